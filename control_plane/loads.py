"""What one router has on each worker now, in columns: a decision reads them all at once.

A row belongs to one worker while it is a member. Values are this router's own; what other routers have sent shows in
the workers' registrations.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"


class Load(IntEnum):
    """REQUESTS and TOKENS (prompt and completion) in flight. UNCOMPUTED: prompt tokens of them that were not cached on
    the worker. PENDING_S: seconds of engine time that they are expected to take. FREE_AT_S: when that will be over,
    monotonic. TURN: which of this router's placements the last one was."""

    REQUESTS = 0
    TOKENS = 1
    UNCOMPUTED = 2
    PENDING_S = 3
    FREE_AT_S = 4
    TURN = 5


@dataclass(frozen=True, slots=True)
class Work:
    """What a request is to a worker. expected_s: engine time of its prefill; 0 where it has none."""

    tokens: int
    uncomputed_tokens: int = 0
    expected_s: float = 0.0


class Loads:
    """Rows are taken and given back."""

    def __init__(self) -> None:
        self._columns: Floats = np.zeros((len(Load), 8))
        self._free = list(range(self._columns.shape[1]))
        self._turn = 0

    def take_row(self) -> int:
        if not self._free:
            rows = self._columns.shape[1]
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
            self._free = list(range(rows, 2 * rows))
        row = self._free.pop(0)
        self._columns[:, row] = 0
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def value(self, row: int, column: Load) -> float:
        return float(self._columns[column, row])

    def begin(self, row: int, work: Work, now_s: float) -> None:
        self._turn += 1
        load = self._columns[:, row]
        load[: Load.FREE_AT_S] += (1, work.tokens, work.uncomputed_tokens, work.expected_s)
        load[Load.FREE_AT_S] = max(load[Load.FREE_AT_S], now_s) + work.expected_s
        load[Load.TURN] = self._turn

    def end(self, row: int, work: Work, now_s: float) -> None:
        """What is left begins now, as far as anybody can tell."""
        load = self._columns[:, row]
        load[: Load.FREE_AT_S] -= (1, work.tokens, work.uncomputed_tokens, work.expected_s)
        if not load[Load.REQUESTS]:
            load[Load.PENDING_S] = 0.0
        if work.expected_s:
            load[Load.FREE_AT_S] = now_s + load[Load.PENDING_S]

    def of(self, rows: NDArray[np.int64]) -> Floats:
        """(columns, rows): a copy."""
        selected: Floats = self._columns[:, rows]
        return selected
