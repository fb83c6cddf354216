"""`rachis bench data-path`: what a token costs on its way from a decode worker to its client."""

from collections.abc import Sequence

from benchmarks import data_path
from benchmarks.data_path import Carried
from cluster_core.errors import InvalidInputError
from command_line.output import err, out, print_json, print_table

_MOST_STEPS_PER_S = 10_000


def rates_of(steps: str) -> list[float]:
    """Raises InvalidInputError."""
    try:
        rates = [float(each) for each in steps.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate <= _MOST_STEPS_PER_S for rate in rates):
        raise InvalidInputError(f"must be numbers above 0 and up to {_MOST_STEPS_PER_S}", field="--steps")
    return sorted(rates)


async def bench_data_path(streams: int, seconds: float, rates: Sequence[float], *, as_json: bool) -> None:
    report = await data_path.measure(streams, seconds, rates, err.print)
    if as_json:
        print_json(report.table())
        return
    rows = [(f"{load.steps_per_s:g} steps/s", load) for load in report.loads]
    rows.append(("before: a message for each token, no router", report.before))
    print_table(
        "", ("", "tokens/s", "tokens a message", "worker, us a token", "router, us a token"),
        [(name, *_cells(load)) for name, load in rows],
    )  # fmt: skip
    out.print(
        f"{streams} streams; one core of the router carries {report.loads[-1].router_tokens_per_s:,.0f} tokens/s; "
        "before, what stands under the router is the process that reads"
    )


def _cells(load: Carried) -> tuple[str, ...]:
    figures = (load.tokens_per_s, load.tokens_per_message, load.worker_us_per_token, load.router_us_per_token)
    return tuple(f"{figure:,.1f}" for figure in figures)
