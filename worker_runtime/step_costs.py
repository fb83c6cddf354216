"""What work costs on one engine, measured while it runs; pure. All averages are decayed: old measurements fade."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cluster_core.engine_reports import EngineCosts

Floats: TypeAlias = "NDArray[np.float64]"

# Of its weight a measurement keeps so much with each later one of its kind: about the last 50 count.
_KEEP = 0.98
# Of sizes of steps: what was measured of one fades with the steps of others, too, if slowly.
_KEEP_SIZES = 0.999
# Of a size: so many measurements of it count as much as any more.
_FULL_WEIGHT = 8.0
# Errors of shorter times than that are those of the clock, and of what happens between steps.
_LEAST_S = 1e-3
# Of the fixed part and of the two kinds of work.
_RIDGE = np.array([1e-6, 1e-4, 1e-4])
# A bound on what is fixed that has moved by less is the same one: each costs as much as a solution.
_NEAR = 0.1
# Two fits that differ by no more than this share of a step, in the mean, say the same.
_ALIKE = 0.05
# The three parts are solved anew after so many steps, and after a sixteenth of all where these are fewer.
_SOLVED_EVERY = 16
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
    """Seconds of a step as a fixed part, and one for each unit of two kinds of work: least squares of the relative
    errors, none of the three negative. Of prefill these are tokens computed, and pairs of one and a token that it
    attends to; of decode, requests and the tokens that they attend to.

    Steps of one size say nothing of others, however many they are: each size is averaged by itself, and all sizes count
    alike, so that a long prompt is priced right after a thousand short pieces. What the measurements do not tell apart
    counts as fixed, by a slight ridge on work: as work, small pieces would make long prompts seem so dear that a worker
    never gets one and never learns better.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._steps = 0
        # None: to be solved when they are asked for.
        self._values: tuple[float, float, float] | None = (0.0, 0.0, 0.0)
        self._unsolved = 0
        # With no more fixed than so much: how much that was, and the values.
        self._within: tuple[float, tuple[float, float, float]] | None = None

    def add(self, seconds: float, one: float, other: float, step_s: float) -> None:
        """step_s: of the whole step, whatever else is in it: an error counts as a share of that."""
        self._steps += 1
        key = math.frexp(one)[1], math.frexp(other)[1]
        size = self._sizes.setdefault(key, _Size())
        size.add(self._steps, (seconds, one, other, step_s))
        self._unsolved += 1
        if size.weight < _FULL_WEIGHT or self._unsolved >= min(self._steps // _SOLVED_EVERY, _SOLVED_EVERY):
            self._values = None

    @property
    def values(self) -> tuple[float, float, float]:
        if self._values is None:
            self._values, self._unsolved, self._within = self._solved(), 0, None
        return self._values

    @property
    def is_measured(self) -> bool:
        return bool(self._sizes)

    def seconds(self, one: float, other: float) -> float:
        """Of a step with so much work."""
        fixed, each, pair = self.values
        return fixed + one * each + other * pair

    def with_no_more_fixed(self, most_s: float) -> tuple[float, float, float]:
        """The values, with no more than `most_s` fixed where the measurements say that as well."""
        values = self.values
        if values[0] <= most_s:
            return values
        if self._within is None or abs(most_s - self._within[0]) > _NEAR * self._within[0]:
            self._within = most_s, self._solved(most_s)
        return self._within[1]

    def _solved(self, most_s: float = math.inf) -> tuple[float, float, float]:
        sizes = self._sizes.values()
        means = np.array([size.means for size in sizes])
        weights = np.array(
            [min(size.weight * _KEEP_SIZES ** (self._steps - size.step), _FULL_WEIGHT) for size in sizes]
        )
        weights = np.sqrt(weights) / np.maximum(means[:, 3], _LEAST_S)
        rows = np.column_stack([np.ones(len(means)), means[:, 1:3]]) * weights[:, None]
        seconds = means[:, 0] * weights
        scale = np.sqrt(np.maximum((rows * rows).sum(axis=0), _TINY))
        rows = rows / scale
        squares, products = rows.T @ rows, rows.T @ seconds
        solution = _not_negative(squares, products, [0, 1, 2])
        most = most_s * scale[0]
        if solution[0] > most:
            other = _not_negative(squares, products - squares[0] * most, [1, 2])
            other[0] = most
            error, others = (float(((rows @ each - seconds) ** 2).sum()) for each in (solution, other))
            if others <= error + _ALIKE**2 * float((weights * means[:, 3]) @ (weights * means[:, 3])):
                solution = other
        fixed, each, pair = (solution / scale).tolist()
        return fixed, each, pair


def _not_negative(squares: Floats, products: Floats, kept: list[int]) -> Floats:
    """Least squares by the normal equations; what is not kept is 0."""
    solution = np.zeros(len(products))
    while kept:
        part = np.linalg.solve(squares[np.ix_(kept, kept)] + np.diag(_RIDGE[kept]), products[kept])
        if (part >= 0).all():
            solution[kept] = part
            break
        del kept[int(part.argmin())]
    return solution


@dataclass(slots=True)
class _Size:
    """Decayed means over the steps of one size: seconds, both kinds of work, seconds of the whole step. step: the last
    of them."""

    weight: float = 0.0
    step: int = 0
    means: tuple[float, ...] = (0.0,) * 4

    def add(self, step: int, values: tuple[float, ...]) -> None:
        self.weight = self.weight * _KEEP + 1.0
        self.step = step
        self.means = tuple(mean + (value - mean) / self.weight for mean, value in zip(self.means, values, strict=True))


class StepCosts:
    """See `cluster_core.engine_reports.EngineCosts`."""

    def __init__(self) -> None:
        self._prefill = _Plane()
        self._decode = _Average()
        self._decode_plane = _Plane()
        self._load = _Average()
        self._pull = _Line()
        self._adapter = _Average()
        self._loaded: tuple[float, int] = (0.0, 0)
        self._costs: EngineCosts | None = EngineCosts()

    def stepped(
        self, seconds: float, prefilled: Sequence[tuple[int, int]], decoding: int, context_tokens: int = 0
    ) -> None:
        """An engine step took so long. prefilled: of each prompt, tokens computed before and in this step.
        context_tokens: those that the requests which decode attend to.

        Of a step that does both, what decoding these alone would take is not counted as prefill. The mean of all that
        decode would not do: under a bound a step takes as long whatever it computes, and what decodes decides how many
        tokens of prompts there are, which would seem to cost nothing.

        One token of a prompt that is cached, or whose KV was pulled, is what a decode is. A worker that computes no
        more of prompts has not shown what they take.
        """
        decoding += sum(tokens == 1 for _, tokens in prefilled)
        context_tokens += sum(before for before, tokens in prefilled if tokens == 1)
        prefilled = [each for each in prefilled if each[1] > 1]
        if not prefilled:
            if decoding:
                self._decode.add(seconds, 1)
                self._decode_plane.add(seconds, decoding, context_tokens, seconds)
                self._costs = None
            return
        self._costs = None
        rest = seconds
        if decoding and self._decode_plane.is_measured:
            rest -= self._decode_plane.seconds(decoding, context_tokens)
        pairs = sum(tokens * (before + tokens / 2) for before, tokens in prefilled)
        self._prefill.add(max(0.0, rest), sum(tokens for _, tokens in prefilled), pairs, seconds)

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
            # No more is fixed than of a step that decodes one request, unless steps of several sizes have shown it.
            most_s = self._decode_plane.seconds(1, 0) if self._decode_plane.is_measured else math.inf
            prefill_s, prefill_s_per_token, prefill_s_per_pair = self._prefill.with_no_more_fixed(most_s)
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
