"""What a stop policy learned: a fading mean for each state and action.

States are binned: requests of the batch and peers into 0, 1, 2, 3-4, 5-8, ... 257-512, 513+ (FEATHER 4.3.1 says
exponential bins; the published code has bins of 4 up to 10), loss into 0 to 4 chunks one by one and 5+. So there are at
most 864 of them.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from cluster_core.engine_reports import PolicyRow

_LOWER_ENDS = (0, 1, *(2**each + 1 for each in range(10)))
_MOST_LOSS = 5
_COUNTS = (
    *(f"{low}-{end - 1}" if end - 1 > low else f"{low}" for low, end in pairwise(_LOWER_ENDS)),
    f"{_LOWER_ENDS[-1]}+",
)
_LOSSES = (*map(str, range(_MOST_LOSS)), f"{_MOST_LOSS}+")
_ACTIONS = ("add", "stop")
# So that what fades stays above zero.
_LEAST_WEIGHT = 1e-9
# In a file: far above what can be, and still a number to all that read it.
_MOST = 2**53

# Batch, loss and peers: places in _COUNTS, _LOSSES, _COUNTS.
Bins = tuple[int, int, int]


def bins_of(batch: int, loss_chunks: int, peers: int) -> Bins:
    return bisect_right(_LOWER_ENDS, batch) - 1, min(loss_chunks, _MOST_LOSS), bisect_right(_LOWER_ENDS, peers) - 1


@dataclass(slots=True)
class Value:
    """A mean that fades."""

    # How often there was something to add, ever.
    taken: int = 0
    # How many of these still count.
    weight: float = 0.0
    mean: float = 0.0


class LearnedValues:
    """By state and action, `add` or `stop`."""

    def __init__(self) -> None:
        self._values: dict[Bins, dict[str, Value]] = {}

    def of(self, bins: Bins) -> Mapping[str, Value]:
        """Of the actions that were taken there."""
        return self._values.get(bins, {})

    def fade(self, bins: Bins, kept: float) -> None:
        """kept: what one that is there counts from now on."""
        for each in self.of(bins).values():
            each.weight = max(_LEAST_WEIGHT, each.weight * kept)

    def add(self, bins: Bins, action: str, value: float) -> None:
        its = self._values.setdefault(bins, {}).setdefault(action, Value())
        its.taken += 1
        its.weight += 1
        its.mean += (value - its.mean) / its.weight

    def rows(self) -> Sequence[PolicyRow]:
        return [_row(bins, known) for bins, known in sorted(self._values.items())]

    def dump(self) -> list[list[str | float]]:
        """For each value the bins of batch, loss and peers, the action, how often it was taken, weight and mean."""
        return [
            [*_labels(bins), action, its.taken, its.weight, its.mean]
            for bins, known in sorted(self._values.items())
            for action, its in sorted(known.items())
        ]

    @classmethod
    def loaded(cls, dumped: Any) -> Self:
        """Raises ValueError for what `dump` cannot have given."""
        if not isinstance(dumped, list):
            raise ValueError("the learned values are not a list")
        learned = cls()
        for row in dumped:
            bins, action, value = _parsed(row)
            known = learned._values.setdefault(bins, {})
            if action in known:
                raise ValueError(f"a learned value is given twice: {row!r:.200}")
            known[action] = value
        return learned


def entries(content: Any, *names: str) -> Mapping[str, Any]:
    """Raises ValueError for anything but an object with these entries."""
    if not isinstance(content, dict) or set(content) != set(names):
        found = ", ".join(sorted(content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"expected the entries {', '.join(names)}, found {found or 'none'!s:.200}")
    return content


def is_number(value: Any) -> bool:
    """From 0 to what can be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST


def _parsed(row: Any) -> tuple[Bins, str, Value]:
    match row:
        case [str(batch), str(loss), str(peers), str(action), int(taken), weight, mean] if (
            {batch, peers} <= set(_COUNTS) and loss in _LOSSES and action in _ACTIONS
        ):
            if is_number(taken) and taken > 0 and is_number(weight) and weight > 0 and is_number(mean):
                bins = _COUNTS.index(batch), _LOSSES.index(loss), _COUNTS.index(peers)
                return bins, action, Value(taken, float(weight), float(mean))
    raise ValueError(f"not a learned value: {row!r:.200}")


def _labels(bins: Bins) -> tuple[str, str, str]:
    batch, loss, peers = bins
    return _COUNTS[batch], _LOSSES[loss], _COUNTS[peers]


def _row(bins: Bins, known: Mapping[str, Value]) -> PolicyRow:
    add, stop = (known.get(each) for each in _ACTIONS)
    return PolicyRow(
        *_labels(bins),
        adds=add.taken if add else 0,
        stops=stop.taken if stop else 0,
        add_value=add.mean if add else None,
        stop_value=stop.mean if stop else None,
    )
