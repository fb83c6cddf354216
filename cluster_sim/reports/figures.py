"""What a simulated run yields, in memory that does not grow with the trace."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Buckets of a histogram are so much wider each: a quantile is off by half of it at most.
_GROWTH = math.log(1.01)
_WINDOWS = 200


class Histogram:
    """Positive values in buckets whose bounds grow by 1%; what is 0 or less is counted as 0."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._zeros = 0
        self.count = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        if value <= 0:
            self._zeros += 1
            return
        bucket = math.floor(math.log(value) / _GROWTH)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def merge(self, other: "Histogram") -> None:
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self._zeros += other._zeros
        self.count += other.count
        self.total += other.total

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """0 where nothing was added."""
        wanted = share * self.count
        for value, at_most in self.cumulative():
            if at_most >= wanted:
                return value
        return 0.0

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(value, how many are at most that), ascending."""
        seen = self._zeros
        if seen:
            yield 0.0, seen
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            yield math.exp((bucket + 0.5) * _GROWTH), seen

    def ccdf(self) -> list[tuple[float, float]]:
        """(value, share of those above it)."""
        return [(value, 1 - seen / self.count) for value, seen in self.cumulative()]


class Series:
    """Amounts over time in at most 200 windows; when time outgrows them, two become one."""

    def __init__(self, window_s: float = 1.0) -> None:
        self.window_s = window_s
        self._amounts: list[float] = []

    def add(self, at_s: float, amount: float) -> None:
        while at_s >= self.window_s * _WINDOWS:
            self.window_s *= 2
            self._amounts = [sum(self._amounts[place : place + 2]) for place in range(0, len(self._amounts), 2)]
        place = int(at_s / self.window_s)
        while len(self._amounts) <= place:
            self._amounts.append(0.0)
        self._amounts[place] += amount

    def per_s(self) -> list[tuple[float, float]]:
        """(beginning of the window, amount a second in it)."""
        return [(place * self.window_s, amount / self.window_s) for place, amount in enumerate(self._amounts)]


@dataclass(slots=True)
class Figures:
    """One variant of a scenario.

    Requests: every one that arrived has one outcome. measured: those that arrived after the warm-up; attained: of them
    within both objectives (`slo_*`, 0: none).
    ttft_s: from arrival, of a session from the end of its prompt; ttft_open_s: of sessions, from when they were opened;
    tpot_s: mean time between the tokens of a request after its first; e2e_s: as ttft_s, to the last token.
    invalidated_tokens: computed for a session that has replaced them.
    duration_s: from the first arrival to the last outcome. gpus: of all workers. dollars_per_hour: of all of them.
    transfer_s: from the wish to pull to the last byte. busy_s: engine seconds of each pool; imbalance: those of its
    busiest worker over the mean. Series: `throughput` and `steps` are tokens and steps of decoding, `prompts` and
    `hits` prompt tokens that were begun and those of them that were cached; `completions` has every outcome.
    """

    name: str
    workers: dict[str, int]
    gpus: int
    dollars_per_hour: float
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    # Further pairs of objectives, TTFT and TPOT, and how many of those measured were within each.
    objectives: tuple[tuple[float, float], ...] = ()
    attained_of: list[int] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    measured: int = 0
    attained: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    generated_tokens: int = 0
    transferred_bytes: int = 0
    invalidated_tokens: int = 0
    local_prefills: int = 0
    retries: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    duration_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    imbalance: dict[str, float] = field(default_factory=dict)
    ttft_s: Histogram = field(default_factory=Histogram)
    ttft_open_s: Histogram = field(default_factory=Histogram)
    tpot_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)
    transfer_s: Histogram = field(default_factory=Histogram)
    throughput: Series = field(default_factory=Series)
    steps: Series = field(default_factory=Series)
    prompts: Series = field(default_factory=Series)
    hits: Series = field(default_factory=Series)
    arrivals: Series = field(default_factory=Series)
    completions: Series = field(default_factory=Series)

    def __post_init__(self) -> None:
        self.attained_of = self.attained_of or [0] * len(self.objectives)

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def finished(self) -> int:
        return self.outcomes.get("finished", 0)

    @property
    def hit_ratio(self) -> float:
        hits = self.device_hit_tokens + self.host_hit_tokens
        return hits / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def goodput_per_s(self) -> float:
        """Requests a second within the objectives, from the first arrival to the last outcome."""
        return self.attainment * self.requests / self.duration_s if self.duration_s else 0.0

    @property
    def attainment(self) -> float:
        return self.attained / self.measured if self.measured else 0.0

    @property
    def mean_batch(self) -> float:
        return self.decode_tokens / self.decode_steps if self.decode_steps else 0.0

    @property
    def dollars_per_million_tokens(self) -> float:
        """Of generated tokens; all GPUs are paid for from the first arrival to the last outcome."""
        dollars = self.dollars_per_hour * self.duration_s / 3600
        return dollars / self.generated_tokens * 1e6 if self.generated_tokens else 0.0

    def utilization(self, pool: str) -> float:
        workers = self.workers.get(pool, 0)
        return self.busy_s.get(pool, 0.0) / (workers * self.duration_s) if workers and self.duration_s else 0.0


def as_json(figures: Figures, *, curves: bool = False) -> dict[str, Any]:
    """For machines: literal numbers, rounded; the same run gives the same text. curves: with CCDF and series."""
    numbers: dict[str, Any] = {
        "name": figures.name,
        "workers": figures.workers,
        "gpus": figures.gpus,
        "requests": figures.requests,
        "outcomes": dict(sorted(figures.outcomes.items())),
        "duration_s": round(figures.duration_s, 3),
        "goodput_per_s": round(figures.goodput_per_s, 4),
        "attainment": round(figures.attainment, 4),
        "throughput_tokens_per_s": round(figures.generated_tokens / figures.duration_s, 2) if figures.duration_s else 0,
        "dollars_per_million_tokens": round(figures.dollars_per_million_tokens, 4),
        **_quantiles("ttft", figures.ttft_s),
        **_quantiles("tpot", figures.tpot_s),
        **_quantiles("e2e", figures.e2e_s),
        "transfer_p90_ms": round(figures.transfer_s.quantile(0.9) * 1000, 2),
        "hit_ratio": round(figures.hit_ratio, 4),
        "device_hit_tokens": figures.device_hit_tokens,
        "host_hit_tokens": figures.host_hit_tokens,
        "prompt_tokens": figures.prompt_tokens,
        "generated_tokens": figures.generated_tokens,
        "transferred_gb": round(figures.transferred_bytes / 1e9, 3),
        **(
            {"ttft_open_p50_ms": round(figures.ttft_open_s.quantile(0.5) * 1000, 2)}
            if figures.ttft_open_s.count
            else {}
        ),
        "invalidated_tokens": figures.invalidated_tokens,
        "local_prefills": figures.local_prefills,
        "retries": figures.retries,
        "preemptions": figures.preemptions,
        "mean_batch": round(figures.mean_batch, 2),
        "utilization": {pool: round(figures.utilization(pool), 4) for pool in figures.workers},
        "imbalance": {pool: round(value, 3) for pool, value in figures.imbalance.items()},
    }
    if curves:
        numbers["ttft_ccdf"] = [[round(value, 6), round(share, 6)] for value, share in figures.ttft_s.ccdf()]
        for name in ("throughput", "steps", "prompts", "hits", "arrivals", "completions"):
            numbers[f"{name}_per_s"] = [
                [round(at_s, 3), round(rate, 3)] for at_s, rate in getattr(figures, name).per_s()
            ]
    return numbers


def _quantiles(name: str, histogram: Histogram) -> dict[str, float]:
    return {f"{name}_p{share}_ms": round(histogram.quantile(share / 100) * 1000, 2) for share in (50, 90, 95, 99)}
