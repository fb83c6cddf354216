"""What a stop policy learned: the table, and the file that keeps it over restarts.

The table has a fading mean for each state and action. States are binned: requests of the batch and peers into 0, 1, 2,
3-4, 5-8, ... 257-512, 513+ (FEATHER 4.3.1 says exponential bins; the published code has bins of 4 up to 10), loss into
0 to 4 chunks one by one and 5+. So it has at most 864 states.

The file of a policy is one JSON object, `{"format": 1, "policy": name, "made_for": {...}, "table": dumped}`. made_for
says what the values depend on: model, hardware, shape of the engine. It also gives the file its name, so another model
has another table and an earlier one is found again. Files are replaced as a whole. One that cannot be used is moved
aside, once: a second one takes the place of the first.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol, Self

from cluster_core.engine import PolicyRow
from cluster_core.errors import UnavailableError

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
# In a file: far above what can be, and still a number to everybody who reads it.
_MOST = 2**53
_FORMAT = 1
_MOST_BYTES = 2**20

# Batch, loss and peers: places in _COUNTS, _LOSSES, _COUNTS.
Bins = tuple[int, int, int]


def bins_of(batch: int, loss_chunks: int, peers: int) -> Bins:
    return bisect_right(_LOWER_ENDS, batch) - 1, min(loss_chunks, _MOST_LOSS), bisect_right(_LOWER_ENDS, peers) - 1


@dataclass(slots=True)
class Value:
    """A mean that fades. taken: how often there was something to add, ever. weight: how many of these still count."""

    taken: int = 0
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


class Loadable(Protocol):
    def load(self, dumped: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Restored:
    """problem: why a file that is there was not used; empty when it was, or when there is none."""

    loaded: bool
    problem: str = ""


class PolicyFile:
    def __init__(self, folder: Path, policy: str, made_for: Mapping[str, str]) -> None:
        self._policy = policy
        self._made_for = dict(made_for)
        canonical = json.dumps(self._made_for, sort_keys=True, separators=(",", ":"))
        self.path = folder / f"{policy}-{sha256(canonical.encode()).hexdigest()[:12]}.json"
        self.stale_path = self.path.with_name(f"{self.path.name}.stale")

    def save(self, table: Any) -> None:
        """Makes the folder where it is missing. Raises UnavailableError when it cannot be written."""
        content = {"format": _FORMAT, "policy": self._policy, "made_for": self._made_for, "table": table}
        text = json.dumps(content, indent=1, allow_nan=False)
        temporary = self.path.with_name(f"{self.path.name}.{token_hex(8)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(text)
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise UnavailableError(f"what policy {self._policy} learned could not be saved: {error}") from None

    def restore(self, policy: Loadable) -> Restored:
        """Gives the policy what was saved. Raises nothing: what cannot be used is moved aside, the policy unchanged."""
        try:
            policy.load(self._read())
        except FileNotFoundError:
            return Restored(loaded=False)
        except (OSError, ValueError) as error:
            return Restored(loaded=False, problem=f"{self.path} is not used: {error}; {self._set_aside()}")
        return Restored(loaded=True)

    def _read(self) -> Any:
        with self.path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON ({error})") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            found = content.get("format") if isinstance(content, dict) else None
            raise ValueError(f"its format is {found!r:.80}, this version reads {_FORMAT}")
        given = entries(content, "format", "policy", "made_for", "table")
        if given["policy"] != self._policy:
            raise ValueError(f"it is of policy {given['policy']!r:.80}, not {self._policy}")
        if given["made_for"] != self._made_for:
            raise ValueError(f"it was made for {given['made_for']!r:.300}, not for {self._made_for}")
        return given["table"]

    def _set_aside(self) -> str:
        try:
            self.path.replace(self.stale_path)
        except OSError as error:
            return f"it could not be moved aside: {error}"
        return f"it was moved to {self.stale_path.name}"


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
