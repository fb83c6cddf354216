"""What work costs on one engine, measured while it runs; pure. All averages are decayed: old measurements fade."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster_core.engine import EngineCosts

# Of its weight a measurement keeps so much with each later one of its kind: about the last 50 count.
_KEEP = 0.98


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


class StepCosts:
    """See `cluster_core.engine.EngineCosts`."""

    def __init__(self) -> None:
        self._prefill = _Average()
        self._decode = _Average()
        self._load = _Average()
        self._pull = _Line()
        self._loaded: tuple[float, int] = (0.0, 0)
        self._costs: EngineCosts | None = EngineCosts()

    def stepped(self, seconds: float, scheduled: Mapping[str, int], tokens: int) -> None:
        """An engine step took so long. scheduled: tokens by request, `tokens` in all.

        Of a step that does both, what a step that only decodes takes is not counted as prefill.
        """
        if not tokens:
            return
        self._costs = None
        if tokens == len(scheduled):
            self._decode.add(seconds, 1)
            return
        decoding = sum(each == 1 for each in scheduled.values())
        rest = seconds - self._decode.value if decoding else seconds
        self._prefill.add(max(0.0, rest), tokens - decoding)

    def loaded(self, seconds: float, tokens: int) -> None:
        """So much has been copied between device and host memory since the start, and how long it took."""
        before_s, before = self._loaded
        if tokens > before:
            self._loaded, self._costs = (seconds, tokens), None
            self._load.add(seconds - before_s, tokens - before)

    def pulled(self, seconds: float, tokens: int) -> None:
        self._costs = None
        self._pull.add(seconds, tokens)

    def costs(self) -> EngineCosts:
        if self._costs is None:
            fixed, each = self._pull.values
            self._costs = EngineCosts(self._prefill.value, self._load.value, self._decode.value, fixed, each)
        return self._costs
