"""Steps of a light engine that are taken at once, because each is like the one before."""

from dataclasses import dataclass

from cluster_sim.engines.light_request import LightRequest

# What sums of seconds may be off.
_SAME_S = 1e-9


@dataclass(frozen=True, slots=True)
class Leap:
    """Steps under way: so many, the first so long, each longer than the one before by `growth_s`. chunks: prompt tokens
    of each request in it; then it is one step."""

    start_s: float
    first_s: float
    growth_s: float
    steps: int
    chunks: tuple[tuple[LightRequest, int], ...]
    decoding: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.lasting_s(self.steps)

    def lasting_s(self, steps: int) -> float:
        """Of the first so many."""
        return steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def begun(self, now_s: float) -> int:
        """Steps that have begun by then; one at least."""
        since_s, fewest, most = now_s - self.start_s - _SAME_S, 1, self.steps
        while fewest < most:
            middle = (fewest + most) // 2
            fewest, most = (fewest, middle) if self.lasting_s(middle) >= since_s else (middle + 1, most)
        return fewest
