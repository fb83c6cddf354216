"""`rachis bench encryption`: what a service's secret costs on the way between routers and workers."""

from benchmarks import encryption
from command_line.bench.telemetry_run import ratio_cell
from command_line.output import err, out, print_json, print_table

_RATIOS = ("ttft", "end_to_end", "router", "worker")


async def bench_encryption(wish: encryption.Wish, *, as_json: bool) -> None:
    found = await encryption.measure(wish, err.print)
    if as_json:
        print_json(found)
        return
    print_table(
        "", ("of what plain text takes", "P50 of TTFT", "P50 of the whole", "router's CPU", "worker's CPU", "in all"),
        [
            (
                arm,
                *(ratio_cell(found[arm][each]) for each in _RATIOS),
                f"{found[arm]['router_in_all']:.3f}, {found[arm]['worker_in_all']:.3f}",
            )
            for arm in ("again", "encrypted")
        ],
    )  # fmt: skip
    plain = found["plain"]
    out.print(
        f"median over {wish.rounds} rounds, and its quartiles; again: in plain text once more; TTFT "
        f"{plain['ttft_ms']:.1f} ms, {plain['end_to_end_ms']:.1f} ms in all, {plain['router_us']:.0f} us of the router "
        f"and {plain['worker_us']:.0f} us of the worker a request in plain text"
    )
