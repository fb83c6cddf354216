"""`rachis chaos`: faults of every kind on an own service: two workers of each pool, two routers, two Redis servers."""

from collections.abc import Callable

from rachis import AsyncClient

from benchmarks import chaos as chaos_bench
from benchmarks.chaos_schedule import Fault, schedule
from benchmarks.chaos_targets import Targets
from cluster_configs.loading import LoadedConfig
from command_line.output import err, out, print_json, print_table
from command_line.own_cluster import Places, own_cluster

_SHOWN_FAILURES = 10


async def chaos(load: Callable[[Places], LoadedConfig], minutes: float, seed: int, *, as_json: bool) -> int:
    """load: the configuration with these settings. Returns 0 where nothing was wrong, unended or leaked."""
    duration_s = minutes * 60
    faults = schedule(duration_s, seed)
    err.print("asking one plain vLLM for the answers")
    found = await chaos_bench.cases(load({}).config, seed)
    async with own_cluster(load) as cluster, AsyncClient(",".join(cluster.addresses)) as client:
        targets = Targets(cluster.service, cluster.router, client, cluster.redis)
        tally = await chaos_bench.play(found, faults, targets, cluster.addresses, duration_s, seed=seed, on_fault=_say)
        err.print("all requests have ended; looking for what is still held")
        left = await chaos_bench.leaks(cluster.addresses)
    result = chaos_bench.report(tally, left, targets.done)
    for sentence in tally.sentences[:_SHOWN_FAILURES]:
        err.print(f"  {sentence}")
    print_json(result) if as_json else _print(result)
    return 1 if tally.wrong or tally.unended or left else 0


def _say(fault: Fault) -> None:
    where = f"{fault.target}-{fault.number}" if fault.target in {"prefill", "decode"} else fault.target
    err.print(f"{fault.at_s:7.1f} s  {fault.kind} {where}" + (f" for {fault.for_s:.1f} s" if fault.for_s else ""))


def _print(result: dict[str, object]) -> None:
    print_table("chaos", ("figure", "value"), [(name, value) for name, value in result.items() if name != "faults"])
    faults = result["faults"]
    assert isinstance(faults, dict)
    out.print("faults: " + ", ".join(f"{number} x {name}" for name, number in sorted(faults.items())))
