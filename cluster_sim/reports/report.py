"""Tables of simulated runs: a row for each measure, variants side by side, each with its ratio to the first variant.

Rows in which no variant has anything to show are left out. A table is as wide as the terminal allows: variants that
do not fit come in further tables, each beginning with the first variant.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from cluster_sim.reports.figures import Figures, Histogram

# Ratios nearer to 1 than that say nothing.
_SAME = 0.02
_STYLES = {True: "green", False: "red"}
_GAP = 2


@dataclass(frozen=True, slots=True)
class Measure:
    """digits: after the point. more_is_better: None where neither is. always: shown even where it is 0 everywhere."""

    name: str
    value: Callable[[Figures], float]
    digits: int = 0
    more_is_better: bool | None = None
    always: bool = False


def _ms(histogram: Callable[[Figures], Histogram], share: float) -> Callable[[Figures], float]:
    return lambda figures: histogram(figures).quantile(share) * 1000


def _quantiles(name: str, histogram: Callable[[Figures], Histogram], shares: Sequence[int]) -> list[Measure]:
    digits = 1 if name == "TPOT" else 0
    return [Measure(f"{name} P{share}, ms", _ms(histogram, share / 100), digits, False) for share in shares]


def _per_s(total: float, figures: Figures) -> float:
    return total / figures.duration_s if figures.duration_s else 0.0


def _percent_of_prompts(hits: Callable[[Figures], int]) -> Callable[[Figures], float]:
    return lambda figures: 100 * hits(figures) / figures.prompt_tokens if figures.prompt_tokens else 0.0


_SCALE = (
    Measure("GPUs", lambda each: each.gpus, always=True),
    Measure("requests", lambda each: each.requests, always=True),
)
_SERVICE = (
    Measure("within objectives, %", lambda each: 100 * each.attainment, 1, True),
    Measure("goodput, requests/s", lambda each: each.goodput_per_s, 2, True),
    Measure("output, tokens/s", lambda each: _per_s(each.generated_tokens, each), 0, True, always=True),
    Measure("$ per million tokens", lambda each: each.dollars_per_million_tokens, 3, False),
    *_quantiles("TTFT", lambda each: each.ttft_s, (50, 90, 99)),
    *_quantiles("TPOT", lambda each: each.tpot_s, (50, 90, 99)),
    *_quantiles("request", lambda each: each.e2e_s, (50, 90, 99)),
    *_quantiles("KV transfer", lambda each: each.transfer_s, (90,)),
    Measure("hits on the device, %", _percent_of_prompts(lambda each: each.device_hit_tokens), 1, True),
    Measure("hits in host memory, %", _percent_of_prompts(lambda each: each.host_hit_tokens), 1, True),
    Measure("KV transferred, GB", lambda each: each.transferred_bytes / 1e9, 1),
    Measure("mean decode batch", lambda each: each.mean_batch, 1),
    Measure("preemptions", lambda each: each.preemptions, 0, False),
    Measure("local prefills", lambda each: each.local_prefills),
    Measure("retries", lambda each: each.retries, 0, False),
    Measure("duration, s", lambda each: each.duration_s, 0),
)


@dataclass(frozen=True, slots=True)
class Row:
    """values: of each variant. ratios: to the first variant, whose own is None; None too where that one has 0."""

    measure: Measure
    values: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        first, *others = self.values
        return None, *(value / first if first > 0 else None for value in others)

    def text(self, place: int) -> str:
        return f"{self.values[place]:,.{self.measure.digits}f}"

    def ratio_text(self, place: int) -> str:
        """Empty where there is none."""
        ratio = self.ratios[place]
        if ratio is None:
            return ""
        return f"x{ratio:.2f}" if ratio < 100 else f"x{ratio:.0f}"

    def is_better(self, place: int) -> bool | None:
        """None: the same as the first, neither is better, or there is nothing."""
        ratio, better = self.ratios[place], self.measure.more_is_better
        if not ratio or better is None or abs(ratio - 1) < _SAME:
            return None
        return (ratio > 1) is better


def rows(runs: Sequence[Figures]) -> list[Row]:
    """Raises ValueError without a run."""
    if not runs:
        raise ValueError("a report needs at least one run")
    found = [Row(each, tuple(float(each.value(run)) for run in runs)) for each in _measures(runs)]
    return [row for row in found if row.measure.always or any(row.values)]


def tables(runs: Sequence[Figures], width: int, title: str = "") -> list[Table]:
    """width: of the terminal, in columns."""
    found, made = rows(runs), list[Table]()
    for places in _side_by_side(runs, found, width):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        for place in places:
            table.add_column(Text(runs[place].name), justify="right", overflow="fold")
            if place:
                table.add_column("", justify="right")
        for row in found:
            cells = [cell for place in places for cell in _cells(row, place)]
            table.add_row(row.measure.name, *cells)
        made.append(table)
    return made


def markdown(runs: Sequence[Figures]) -> str:
    """One table of all variants, ratios in parentheses."""
    lines = [["", *(run.name for run in runs)], ["---", *["---:"] * len(runs)]]
    for row in rows(runs):
        ratios = [row.ratio_text(place) for place in range(len(runs))]
        cells = [f"{row.text(place)} ({ratio})" if ratio else row.text(place) for place, ratio in enumerate(ratios)]
        lines.append([row.measure.name, *cells])
    return "".join(f"| {' | '.join(_escaped(cell) for cell in line)} |\n" for line in lines)


def _measures(runs: Sequence[Figures]) -> Iterator[Measure]:
    """With those that are named by what the runs have: pools and outcomes."""
    yield from _SCALE
    pools = list(dict.fromkeys(pool for run in runs for pool in run.workers))
    yield from (Measure(f"{pool} workers", _entry(pool, lambda each: each.workers)) for pool in pools)
    for name in sorted({name for run in runs for name in run.outcomes}):
        yield Measure(name, _entry(name, lambda each: each.outcomes), 0, name == "finished")
    yield from _SERVICE
    for pool in pools:
        yield Measure(f"{pool} busy, %", _busy_percent(pool), 1)
        yield Measure(f"{pool} imbalance", _entry(pool, lambda each: each.imbalance), 2, False)


def _entry(name: str, table: Callable[[Figures], Mapping[str, float]]) -> Callable[[Figures], float]:
    return lambda figures: table(figures).get(name, 0)


def _busy_percent(pool: str) -> Callable[[Figures], float]:
    return lambda figures: 100 * figures.utilization(pool)


def _side_by_side(runs: Sequence[Figures], found: Sequence[Row], width: int) -> list[list[int]]:
    """Places of the variants of each table."""
    taken = max(len(row.measure.name) for row in found)

    def needs(place: int) -> int:
        texts = [runs[place].name, *(row.text(place) for row in found)]
        ratios = max(len(row.ratio_text(place)) for row in found)
        return max(map(len, texts)) + _GAP + (ratios + _GAP if place else 0)

    made, left = [[0]], width - taken - needs(0)
    for place in range(1, len(runs)):
        if needs(place) > left and len(made[-1]) > 1:
            made.append([0])
            left = width - taken - needs(0)
        made[-1].append(place)
        left -= needs(place)
    return made


def _cells(row: Row, place: int) -> Iterator[Text]:
    yield Text(row.text(place))
    if place:
        better = row.is_better(place)
        yield Text(row.ratio_text(place), style=_STYLES[better] if better is not None else "dim")


def _escaped(text: str) -> str:
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())
