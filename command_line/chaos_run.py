"""`rachis chaos`: faults of every kind on an own service of two workers of each pool and two routers."""

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import chaos as chaos_bench
from benchmarks.chaos_schedule import Fault, schedule
from benchmarks.chaos_targets import SecondRouter, Targets
from cluster_configs.loading import LoadedConfig
from cluster_core.errors import StartError
from command_line.output import err, out, print_json, print_table
from command_line.own_service import target_service
from control_plane.client import RachisClient
from control_plane.service.embedded_redis import EmbeddedRedis
from control_plane.service.state import StateFile

TWO_OF_EACH = {
    "service.name": "chaos",
    "pools.prefill.workers": 2,
    "pools.decode.workers": 2,
    "pools.prefill.cpus_per_worker": 0.25,
    "pools.decode.cpus_per_worker": 0.25,
}
_SHOWN_FAILURES = 10


async def chaos(
    load: Callable[[str], LoadedConfig], state_file: StateFile, minutes: float, seed: int, *, as_json: bool
) -> int:
    """load: the configuration with this Redis. Returns 0 where nothing was wrong, unended or leaked."""
    duration_s = minutes * 60
    faults = schedule(duration_s, seed)
    with tempfile.TemporaryDirectory(prefix="rachis-chaos-") as folder:
        own_redis = EmbeddedRedis(Path(folder))
        await own_redis.start()
        keeping = asyncio.create_task(own_redis.keep())
        loaded = load(own_redis.url)
        router = SecondRouter(_arguments(loaded))
        try:
            err.print("asking one plain vLLM for the answers")
            found = await chaos_bench.cases(loaded.config, seed)
            async with target_service(None, state_file, loaded, always_own=True) as target:
                await router.start()
                if target.pid is None:
                    raise StartError("an own service has a process")
                async with RachisClient(target.address) as client:
                    targets = Targets(target.pid, client, own_redis, router)
                    addresses = (target.address, router.address)
                    tally = await chaos_bench.play(
                        found, faults, targets, addresses, duration_s, seed=seed, on_fault=_say
                    )
                    err.print("all requests have ended; looking for what is still held")
                    left = await chaos_bench.leaks(addresses)
        finally:
            await router.stop()
            keeping.cancel()
            await own_redis.stop()
    result = chaos_bench.report(tally, left, targets.done)
    for sentence in tally.sentences[:_SHOWN_FAILURES]:
        err.print(f"  {sentence}")
    print_json(result) if as_json else _print(result)
    return 1 if tally.wrong or tally.unended or left else 0


def _arguments(loaded: LoadedConfig) -> list[str]:
    """What makes another router of the same service."""
    values = {entry.key: entry.value for entry in loaded.entries if entry.source != "default"}
    values.pop("router.port", None)
    return [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]


def _say(fault: Fault) -> None:
    where = f"{fault.target}-{fault.number}" if fault.target in {"prefill", "decode"} else fault.target
    err.print(f"{fault.at_s:7.1f} s  {fault.kind} {where}" + (f" for {fault.for_s:.1f} s" if fault.for_s else ""))


def _print(result: dict[str, object]) -> None:
    print_table("chaos", ("figure", "value"), [(name, value) for name, value in result.items() if name != "faults"])
    faults = result["faults"]
    assert isinstance(faults, dict)
    out.print("faults: " + ", ".join(f"{number} x {name}" for name, number in sorted(faults.items())))
