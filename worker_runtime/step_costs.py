"""What work costs on one engine, measured while it runs; pure. All averages are decayed: old measurements fade."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster_core.engine_reports import EngineCosts

# Of its weight a measurement keeps so much with each later one of its kind: about the last 50 count.
_KEEP = 0.98
# The same of steps that only decode, where batch and context change slowly: about the last 1,000 tell them apart.
_KEEP_DECODE = 0.999
_RIDGE = 1e-4
# Where there was no work of a kind at all.
_TINY = 1e-300


@dataclass(slots=True)
class _Average:
    """Seconds for each unit of work."""

    seconds: float = 0.0
    units: float = 0.0

    def add(self, seconds: float, units: float) -> None:
        self.seconds = self.seconds * _KEEP + seconds
        self.units = self.units * _KEEP + units

    @property
    def value(self) -> float:
        return self.seconds / self.units if self.units else 0.0


@dataclass(slots=True)
class _Line:
    """Seconds as a fixed part and one for each unit of work, by least squares; neither is negative."""

    weight: float = 0.0
    units: float = 0.0
    seconds: float = 0.0
    units_squared: float = 0.0
    product: float = 0.0

    def add(self, seconds: float, units: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("units", units),
            ("seconds", seconds),
            ("units_squared", units * units),
            ("product", units * seconds),
        ):
            setattr(self, name, getattr(self, name) * _KEEP + value)

    @property
    def values(self) -> tuple[float, float]:
        """(fixed, for each unit). Where all had one size the two cannot be told apart: nothing is fixed then."""
        if not self.units_squared:
            return (self.seconds / self.weight if self.weight else 0.0), 0.0
        spread = self.weight * self.units_squared - self.units * self.units
        if spread <= 1e-9 * self.weight * self.units_squared:
            return 0.0, self.product / self.units_squared
        slope = (self.weight * self.product - self.units * self.seconds) / spread
        fixed = (self.seconds - slope * self.units) / self.weight
        if slope <= 0:
            return self.seconds / self.weight, 0.0
        return (fixed, slope) if fixed >= 0 else (0.0, self.product / self.units_squared)


class _Plane:
    """Seconds of a step as a fixed part, and one for each unit of two kinds of work: least squares, none of them
    negative. Of prefill these are tokens computed, and pairs of one and a token that it attends to; of decode, requests
    and the tokens that they attend to.

    What the measurements do not tell apart is spread over the three by a slight ridge.
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        # Solved when asked for: steps are many, and costs are read once in a while.
        self._values: tuple[float, float, float] | None = (0.0, 0.0, 0.0)

    def add(self, seconds: float, one: float, other: float) -> None:
        work = np.array([1.0, one, other])
        self._squares = self._squares * self._keep + np.outer(work, work)
        self._products = self._products * self._keep + seconds * work
        self._values = None

    @property
    def values(self) -> tuple[float, float, float]:
        if self._values is None:
            self._values = self._solved()
        return self._values

    def _solved(self) -> tuple[float, float, float]:
        scale = np.sqrt(np.maximum(np.diag(self._squares), _TINY))
        squares = self._squares / np.outer(scale, scale)
        products = self._products / scale
        solution = np.zeros(3)
        kept = [0, 1, 2]
        while kept:
            part = np.linalg.solve(squares[np.ix_(kept, kept)] + _RIDGE * np.eye(len(kept)), products[kept])
            if (part >= 0).all():
                solution[kept] = part
                break
            del kept[int(part.argmin())]
        fixed, each, pair = (solution / scale).tolist()
        return fixed, each, pair


class StepCosts:
    """See `cluster_core.engine_reports.EngineCosts`."""

    def __init__(self) -> None:
        self._prefill = _Plane(_KEEP)
        self._decode = _Average()
        self._decode_plane = _Plane(_KEEP_DECODE)
        self._load = _Average()
        self._pull = _Line()
        self._adapter = _Average()
        self._loaded: tuple[float, int] = (0.0, 0)
        self._costs: EngineCosts | None = EngineCosts()

    def stepped(
        self, seconds: float, prefilled: Sequence[tuple[int, int]], decoding: int, context_tokens: int = 0
    ) -> None:
        """An engine step took so long. prefilled: of each prompt, tokens computed before and in this step.
        context_tokens: of a step that only decodes, those that its requests attend to.

        Of a step that does both, what a step that only decodes takes is not counted as prefill.
        """
        if not prefilled:
            if decoding:
                self._decode.add(seconds, 1)
                self._decode_plane.add(seconds, decoding, context_tokens)
                self._costs = None
            return
        self._costs = None
        rest = seconds - self._decode.value if decoding else seconds
        pairs = sum(tokens * (before + tokens / 2) for before, tokens in prefilled)
        self._prefill.add(max(0.0, rest), sum(tokens for _, tokens in prefilled), pairs)

    def loaded(self, seconds: float, tokens: int) -> None:
        """So much has been copied between device and host memory since the start, and how long it took."""
        before_s, before = self._loaded
        if tokens > before:
            self._loaded, self._costs = (seconds, tokens), None
            self._load.add(seconds - before_s, tokens - before)

    def pulled(self, seconds: float, tokens: int) -> None:
        self._costs = None
        self._pull.add(seconds, tokens)

    def adapter_loaded(self, seconds: float) -> None:
        self._costs = None
        self._adapter.add(seconds, 1)

    def costs(self) -> EngineCosts:
        if self._costs is None:
            prefill_s, prefill_s_per_token, prefill_s_per_pair = self._prefill.values
            decode_s, decode_s_per_request, decode_s_per_token = self._decode_plane.values
            pull_s, pull_s_per_token = self._pull.values
            self._costs = EngineCosts(
                prefill_s=prefill_s,
                prefill_s_per_token=prefill_s_per_token,
                prefill_s_per_pair=prefill_s_per_pair,
                load_s_per_token=self._load.value,
                decode_step_s=self._decode.value,
                pull_s=pull_s,
                pull_s_per_token=pull_s_per_token,
                adapter_load_s=self._adapter.value,
                decode_s=decode_s,
                decode_s_per_request=decode_s_per_request,
                decode_s_per_token=decode_s_per_token,
            )
        return self._costs
