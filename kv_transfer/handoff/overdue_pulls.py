"""Pulls that run past their deadline: nobody waits for them any more, and yet they may write into their blocks.

A prefill process that is frozen, or a host that is cut off, answers no read and breaks none off. So at its deadline a
pull is given up: its request computes the prompt in other blocks, while those of the pull are kept from everybody
(`Quarantine`, in the scheduler) until NIXL says in every worker that the transfer is over, done or broken off
(`OverduePulls`). A transfer that is under way is not released before: NIXL may stop telling of it without stopping it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class PullReport:
    """What one worker has seen since its last report, by request; added up over workers: how many of them."""

    given_up: Counter[str] = field(default_factory=Counter)
    over: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(self.given_up or self.over)

    def __add__(self, other: "PullReport") -> "PullReport":
        return PullReport(self.given_up + other.given_up, self.over + other.over)


class OverduePulls:
    """Those of one worker. take_ended: removes the transfers that are over from a table of handles by request, and
    returns the requests that have none left."""

    def __init__(self, take_ended: Callable[[dict[str, list[Any]]], Iterable[str]]) -> None:
        self._take_ended = take_ended
        self._transfers: dict[str, list[Any]] = {}
        self._report = PullReport()

    def __len__(self) -> int:
        return len(self._transfers)

    def give_up(self, request_id: str, handles: Sequence[Any]) -> None:
        """handles: of its transfers that are under way; none where it has not begun, and will not any more."""
        self._report.given_up[request_id] += 1
        self._transfers[request_id] = list(handles)

    def poll(self) -> None:
        """Looks for those that are over."""
        for request_id in [name for name, handles in self._transfers.items() if not handles]:
            del self._transfers[request_id]
            self._report.over[request_id] += 1
        for request_id in self._take_ended(self._transfers):
            self._transfers.pop(request_id, None)
            self._report.over[request_id] += 1

    def report(self) -> PullReport:
        """Since the last call."""
        report, self._report = self._report, PullReport()
        return report


class Quarantine:
    """Blocks that a pull may still write into. pool: takes part in counting who holds a block."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._blocks: dict[str, list[Any]] = {}
        # Workers in which the pull is not over.
        self._running: Counter[str] = Counter()
        # Since the start.
        self.pulls = 0

    @property
    def blocks(self) -> list[Any]:
        return [block for blocks in self._blocks.values() for block in blocks]

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def take_in(self, report: PullReport, blocks_of: Callable[[str], Sequence[Any]]) -> None:
        """blocks_of: the blocks that a request's pull writes into, which the request still holds. That one is over may
        be heard before that it was given up, which waits for the end of the step that is under way."""
        for request_id, workers in report.given_up.items():
            if request_id not in self._blocks:
                blocks = self._blocks[request_id] = list(blocks_of(request_id))
                self._pool.touch(blocks)
                self.pulls += 1
            self._running[request_id] += workers
        self._running.subtract(report.over)
        for request_id in report.given_up | report.over:
            if request_id in self._blocks and not self._running[request_id]:
                del self._running[request_id]
                self._pool.free_blocks(reversed(self._blocks.pop(request_id)))
