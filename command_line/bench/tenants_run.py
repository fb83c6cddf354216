"""`rachis bench tenants`: one service with keys and TLS, and routers that differ in how tenants share."""

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

import grpc
from rachis import AsyncClient

from benchmarks import tenants
from benchmarks.certificates import Authority
from benchmarks.kept_command import KeptCommand
from cluster_configs.loading import LoadedConfig
from cluster_core.clock import unix_ms
from cluster_wire.secret import write_secret
from command_line.output import err, out, print_json
from command_line.own_cluster import OwnCluster, Places, own_cluster
from control_plane.access.api_keys import new_key
from control_plane.access.key_file import edit
from control_plane.access.roles import Role

_HOST = "127.0.0.1"
_NEVER_REACHED = '"*": {requests_per_s: 1000000, tokens_per_s: 1000000000}'
_NO_TLS = {"security__certificate_file": None, "security__certificate_key_file": None, "security__ca_file": None}


async def bench_tenants(
    load: Callable[[Places], LoadedConfig], requests: int, victim_requests: int, pairs: int, *, as_json: bool
) -> None:
    with tempfile.TemporaryDirectory(prefix="rachis-tenants-") as name:
        folder = Path(name)
        keys, secured = _secured(folder)
        async with own_cluster(lambda places: load({**secured, **places})) as cluster, AsyncExitStack() as stack:
            routers = _routers(cluster, folder)
            for router in routers.values():
                stack.push_async_callback(router.stop)
                await router.start()
            ca = (folder / "authority.pem").read_bytes()
            clients: dict[tuple[str, str], AsyncClient] = {}
            for router_name, router in {"never": cluster.service, **routers}.items():
                for tenant, key in keys.items():
                    credentials = grpc.ssl_channel_credentials(ca) if router_name != "plain" else None
                    client = AsyncClient(router.address, credentials=credentials, api_key=key)
                    clients[router_name, tenant] = await stack.enter_async_context(client)
            report = await tenants.measure(clients, requests, victim_requests, pairs, err.print)
    print_json(asdict(report)) if as_json else _print(report)


def _secured(folder: Path) -> tuple[dict[str, str], dict[str, object]]:
    """Keys by tenant, and the settings of a service that has them."""
    write_secret(folder / "secret")
    chain, key_of_chain = Authority(folder).sign("service", _HOST)
    keys = {}
    for tenant, role in (("acme", Role.GENERATE), ("zeta", Role.GENERATE), ("ops", Role.OBSERVE)):
        key, keys[tenant] = new_key(tenant, tenant, [role], lowest_priority=0, now_s=unix_ms() / 1000, expires_s=None)
        edit(folder / "keys.json", lambda known, key=key: known.update({key.key_id: key}))  # type: ignore[misc]
    return keys, {
        "security.keys_file": str(folder / "keys.json"),
        "security.secret_file": str(folder / "secret"),
        "security.certificate_file": str(chain),
        "security.certificate_key_file": str(key_of_chain),
        "security.ca_file": str(folder / "authority.pem"),
    }


def _routers(cluster: OwnCluster, folder: Path) -> dict[str, KeptCommand]:
    """Beside the service's own."""
    limits = folder / "tenants.yaml"
    limits.write_text(_NEVER_REACHED)
    few = {"router__max_in_flight_requests": tenants.SLOTS, "router__max_queued_requests": 1024}
    return {
        "always": cluster.another_router(security__sharing="always"),
        "shares": cluster.another_router(router__tenant_share=0.5, **few),
        "keyed": cluster.another_router(),
        "plain": cluster.another_router(security__keys_file=None, **_NO_TLS),
        "rated": cluster.another_router(security__tenants_file=str(limits)),
    }


def _print(report: tenants.TenantsReport) -> None:
    out.print(f"{report.requests} requests of a tenant for prompts of which another one has asked half:")
    for sharing in ("never", "always"):
        p_value, statistic = (getattr(report, f"{name}_{sharing}") for name in ("timing_p_value", "statistic"))
        out.print(f"  sharing {sharing}: Kolmogorov-Smirnov statistic {statistic:.3f}, p-value {p_value:.3g}")
    out.print(f"  cached tokens that it was told of with sharing never: {report.cached_tokens_never}")
    out.print(
        f"P90 of TTFT of a tenant beside one with ten times its share: {report.victim_p90_ratio:.2f} times the "
        f"{report.victim_p90_alone_ms:.0f} ms alone; {report.victim_p90_ratio_beside_long_prompts:.2f} times where "
        f"that one's prompts are five times as long; {report.victim_p90_ratio_without_shares:.2f} times as one tenant"
    )
    out.print(
        f"with keys and TLS P50 of TTFT is {report.tls_ttft_ratio:.3f} times, and the router's CPU "
        f"{report.tls_router_cpu_ratio:.3f} times what it is without"
    )
    out.print(
        f"with rates P50 of TTFT is {report.rates_ttft_ratio:.3f} times, and the router's CPU "
        f"{report.rates_router_cpu_ratio:.3f} times what it is without"
    )
    for sentence in report.failures[:3]:
        err.print(f"  {sentence}", markup=False)
