"""Which decisions earned which reward: decode tokens per second of the batch that they formed.

A step that also prefills, or waits for KV, says nothing of decoding: the decisions that formed its batch are rewarded
with the next one that only decodes. So does a step by arrival order, which no decision formed; earlier ones get no
reward of it either. A policy learns once the state is known that came after, also from batches without a decision.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.stop_policies import BatchState, Decision, StopPolicy

# Decisions that wait for a step that only decodes.
_MOST_CARRIED = 64


@dataclass(slots=True, eq=False)
class FormedBatch:
    """The batch of one step."""

    decisions: Sequence[Decision]
    by_arrival: bool
    # None for a step that says nothing, or has not come back.
    tokens_per_s: float | None = None
    seconds: float = 0.0
    executed: bool = False
    followed: bool = False
    next_state: BatchState | None = None


class RewardLedger:
    """Steps may overlap: several batches may be formed before the first comes back. They come back in order."""

    def __init__(self, policy: StopPolicy) -> None:
        self._policy = policy
        self._batches: deque[FormedBatch] = deque()
        self._carried: list[Decision] = []

    def formed(self, decisions: Sequence[Decision], *, by_arrival: bool = False) -> FormedBatch:
        if self._batches:
            last = self._batches[-1]
            last.followed = True
            last.next_state = decisions[0].state if decisions else None
        batch = FormedBatch(decisions, by_arrival)
        self._batches.append(batch)
        self._settle()
        return batch

    def executed(self, batch: FormedBatch, tokens_per_s: float | None, seconds: float = 1.0) -> None:
        """seconds: in which it was executed."""
        batch.executed, batch.tokens_per_s, batch.seconds = True, tokens_per_s, seconds
        self._settle()

    def _settle(self) -> None:
        while self._batches and self._batches[0].executed and self._batches[0].followed:
            batch = self._batches.popleft()
            decisions = [*self._carried, *batch.decisions]
            if batch.by_arrival:
                self._carried = []
            elif batch.tokens_per_s is None:
                self._carried = decisions[-_MOST_CARRIED:]
            else:
                self._carried = []
                self._policy.learn(decisions, batch.tokens_per_s, batch.next_state, batch.seconds)
