"""What one router has on each worker now, in columns: a decision reads them all at once.

A row belongs to one worker while it is a member. Values are this router's own; those of others: `other_routers`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cluster_core.tenant_shares import Claimant
from control_plane.fleet.tenant_lines import TenantLines

Floats: TypeAlias = "NDArray[np.float64]"


# Sums of seconds are as exact as floating point is.
_NOTHING_S = 1e-9


class Load(IntEnum):
    """The columns. Points in time are monotonic."""

    # In flight; tokens of prompt and completion.
    REQUESTS = 0
    TOKENS = 1
    # Prompt tokens of them that were not cached on the worker.
    UNCOMPUTED = 2
    # Engine time that the prefills in flight are expected to take.
    PENDING_S = 3
    # When one of them was over last, or began on an idle worker.
    PROGRESS_S = 4
    # What the longest of them is expected to take.
    LONGEST_S = 5
    # When what has come of prompts that still arrive should be computed.
    ARRIVING_UNTIL_S = 6
    # Which of this router's placements the last one was.
    TURN = 7
    # Of those in flight, the requests that decode, and the tokens that these attend to.
    DECODING = 8
    DECODING_TOKENS = 9
    # Of the whole answers of those, and of those that will decode there once they are prefilled.
    ANSWER_TOKENS = 10
    # Requests and tokens of the latter.
    COMING = 11
    COMING_TOKENS = 12
    # Best effort that is not prefilled yet, so that engines serve others before it: requests, and their tokens.
    OVERTAKEN = 13
    OVERTAKEN_TOKENS = 14
    # As the three above, of the prefills that are not best effort.
    AHEAD_S = 15
    AHEAD_PROGRESS_S = 16
    AHEAD_LONGEST_S = 17
    # Requests in flight whose prompts still arrived when they were sent.
    ARRIVING = 18
    # What other routers had in its queue at `PROGRESS_S`.
    OTHERS_S = 19
    # Of those that decode or will, best effort.
    BEST_EFFORT = 20


# Of all prefills in flight, and of those that are not best effort: pending, progress, longest.
_ALL = (Load.PENDING_S, Load.PROGRESS_S, Load.LONGEST_S)
_AHEAD = (Load.AHEAD_S, Load.AHEAD_PROGRESS_S, Load.AHEAD_LONGEST_S)


@dataclass(frozen=True, slots=True)
class Work:
    """What a request is to a worker."""

    tokens: int
    uncomputed_tokens: int = 0
    # Engine time of its prefill; 0 where it has none.
    expected_s: float = 0.0
    # The prompt still comes, so that nobody can say when its prefill should be over.
    arriving: bool = False
    # Of the tokens, those of the answer; it is all there at the end only.
    answer_tokens: int = 0
    # It is decoded there, not only prefilled.
    decodes: bool = True
    # Engines prefill others first, those that come later too.
    best_effort: bool = False
    # Whose turn at the engine it waits for, and the weight of that tenant; None where nobody asks.
    whose: Claimant | None = None
    weight: float = 1.0

    @property
    def context_tokens(self) -> float:
        """What a step of its decode attends to, in the mean."""
        return self.tokens - self.answer_tokens / 2

    @property
    def prefilled(self) -> "Work":
        """What is left of it then."""
        return Work(self.tokens, answer_tokens=self.answer_tokens, decodes=self.decodes, best_effort=self.best_effort)

    @property
    def pending_s(self) -> float:
        return 0.0 if self.arriving else self.expected_s

    @property
    def lines(self) -> tuple[tuple[Load, Load, Load], ...]:
        """Where its prefill waits."""
        return (_ALL,) if self.best_effort else (_ALL, _AHEAD)


class Loads:
    """Rows are taken and given back."""

    def __init__(self) -> None:
        self._columns: Floats = np.zeros((len(Load), 8))
        self._free = list(range(self._columns.shape[1]))
        self._turn = 0
        self.lines = TenantLines()

    def take_row(self) -> int:
        if not self._free:
            rows = self._columns.shape[1]
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
            self._free = list(range(rows, 2 * rows))
        row = self._free.pop(0)
        self._columns[:, row] = 0
        self.lines.forget(row)
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def value(self, row: int, column: Load) -> float:
        return float(self._columns[column, row])

    def begin(self, row: int, work: Work, now_s: float, others_s: float = 0.0) -> None:
        """others_s: what other routers have in its queue."""
        self._turn += 1
        load = self._columns[:, row]
        load[Load.TURN] = self._turn
        if work.arriving:
            load[Load.ARRIVING_UNTIL_S] = max(load[Load.ARRIVING_UNTIL_S], now_s) + work.expected_s
        else:
            if not load[Load.PENDING_S]:
                load[Load.OTHERS_S] = others_s
            for pending, progress, longest in work.lines:
                if not load[pending]:
                    load[progress], load[longest] = now_s, work.expected_s
                else:
                    load[longest] = max(load[longest], work.expected_s)
                load[pending] += work.pending_s
        load[: Load.PENDING_S] += (1, work.tokens, work.uncomputed_tokens)
        self._stand(row, work, 1)
        self.lines.add(row, work)

    def end(self, row: int, work: Work, now_s: float) -> None:
        """The request is gone; a prefill that is not over is given up, which is no progress of the worker's. What was
        expected of a prompt that still came is expected no more."""
        load = self._columns[:, row]
        if work.arriving:
            left_s = load[Load.ARRIVING_UNTIL_S] - work.expected_s
            load[Load.ARRIVING_UNTIL_S] = left_s if left_s > now_s else 0.0
        for pending, progress, longest in work.lines:
            # What was done since was done of it, where it is more than all others together: nothing of those.
            is_most = work.pending_s > load[pending] - work.pending_s
            if is_most and now_s - load[progress] <= load[longest]:
                load[progress] = now_s
        self._leave(row, work)

    def prefilled(self, row: int, work: Work, now_s: float, others_s: float = 0.0) -> None:
        """The request's prefill is over, and it goes on. others_s: as in `begin`."""
        self._leave(row, work)
        self._columns[Load.REQUESTS, row] += 1
        self._columns[Load.TOKENS, row] += work.tokens
        self._stand(row, work.prefilled, 1)
        if work.pending_s:
            self._columns[Load.OTHERS_S, row] = others_s
            for _, progress, _ in work.lines:
                self._columns[progress, row] = now_s

    def _leave(self, row: int, work: Work) -> None:
        load = self._columns[:, row]
        load[: Load.PENDING_S] -= (1, work.tokens, work.uncomputed_tokens)
        for pending, _, longest in work.lines:
            load[pending] -= work.pending_s
            # None of those that are left takes longer.
            load[longest] = min(load[longest], load[pending])
            # Nor is what is no number any more: without end less without end.
            if not load[pending] >= _NOTHING_S:
                load[pending] = load[longest] = 0.0
        self._stand(row, work, -1)
        self.lines.remove(row, work)
        if not load[Load.ARRIVING]:
            load[Load.ARRIVING_UNTIL_S] = 0.0

    def _stand(self, row: int, work: Work, sign: int) -> None:
        """Where it stands of prefill and decode: one more there, or one less."""
        load = self._columns[:, row]
        load[Load.ARRIVING] += sign * work.arriving
        if work.best_effort and work.expected_s:
            load[Load.OVERTAKEN] += sign
            load[Load.OVERTAKEN_TOKENS] += sign * work.tokens
        if not work.decodes:
            return
        load[Load.ANSWER_TOKENS] += sign * work.answer_tokens
        load[Load.BEST_EFFORT] += sign * work.best_effort
        if work.expected_s:
            load[Load.COMING] += sign
            load[Load.COMING_TOKENS] += sign * work.context_tokens
        else:
            load[Load.DECODING] += sign
            load[Load.DECODING_TOKENS] += sign * work.context_tokens

    def of(self, rows: NDArray[np.int64]) -> Floats:
        """(columns, rows): a copy."""
        selected: Floats = self._columns[:, rows]
        return selected
