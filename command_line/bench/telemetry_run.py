"""`rachis bench telemetry`: what exported traces and logs in JSON cost."""

from collections.abc import Mapping
from typing import Any

from benchmarks import telemetry
from command_line.output import err, out, print_json, print_table

_RATIOS = ("ttft", "end_to_end", "router")


async def bench_telemetry(
    rounds: int, requests: int, concurrency: int, steps: float, sample_rate: float, *, as_json: bool
) -> None:
    found = await telemetry.measure(telemetry.Wish(rounds, requests, concurrency, steps, sample_rate), err.print)
    if as_json:
        print_json(found)
        return
    arms = ("again", "traces", "logs")
    print_table(
        "", ("of what it is without", "P50 of TTFT", "P50 of the whole", "router's CPU", "in all"),
        [
            (arm, *(ratio_cell(found[arm][each]) for each in _RATIOS), f"{found[arm]['router_in_all']:.3f}")
            for arm in arms
        ],
    )  # fmt: skip
    off = found["off"]
    out.print(
        f"median over {rounds} rounds, and its quartiles; again: without them once more; TTFT {off['ttft_ms']:.1f} ms, "
        f"{off['end_to_end_ms']:.1f} ms in all, {off['router_us']:.0f} us of the router a request without"
    )
    out.print(
        f"{found['exported']} traces went to the collector; stages explain "
        f"{found['traced_of_client_time']['median']:.1%} of what clients waited; recording one takes "
        f"{found['recording_us']:.1f} us"
    )


def ratio_cell(spread: Mapping[str, Any]) -> str:
    return f"{spread['median']:.3f} ({spread['low']:.3f} to {spread['high']:.3f})"
