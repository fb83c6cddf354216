"""Where each request was tried, and whether anybody could know that the worker hung."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from control_plane.fleet.vitality import VITALITY_TIMING

# A router knows of a worker that hangs once somebody has waited there for so long, with what messages take.
_KNOWN_S = VITALITY_TIMING.doubtful_s + 0.5
# A worker that hangs has been found out so long after it was asked: a first step is waited for ten seconds.
_FOUND_OUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Try:
    """At one worker. may_be_known: its engine hung, and somebody else had waited there for a while."""

    host: str
    at_s: float
    may_be_known: bool


class Tries:
    """Of all requests whose prompts are whole; jobs are named by their request's nonce and the number of the try."""

    def __init__(self) -> None:
        self._of: dict[str, list[Try]] = {}
        self._asked_s: dict[str, float] = {}
        # (host, from, until): engines that hung; until is infinite while they do.
        self._stalls: list[tuple[str, float, float]] = []

    def stall_begins(self, host: str, now_s: float) -> None:
        self._stalls.append((host, now_s, math.inf))

    def stall_ends(self, host: str, now_s: float) -> None:
        """All of that worker."""
        self._stalls = [
            (name, begin_s, min(end_s, now_s) if name == host else end_s) for name, begin_s, end_s in self._stalls
        ]

    def asked(self, host: str, job: str, live_jobs: Iterable[str], now_s: float) -> None:
        """live_jobs: names of all that the engine has, this one among them."""
        others = [self._asked_s.get(other, now_s) for other in live_jobs if other != job]
        waited_s = now_s - min(others, default=now_s)
        self._asked_s[job] = now_s
        tried = Try(host, now_s, self._hangs(host, now_s, now_s) and waited_s >= _KNOWN_S)
        self._of.setdefault(nonce_of(job), []).append(tried)

    def unknown_hangs(self, nonce: str) -> int:
        """How many tries in one pool were at workers that hung; 0 where somebody could know it of one after the first.

        A first try goes to whoever holds most of the prompt, second tries go where nobody waits in vain.
        """
        tries = self._of.get(nonce, [])
        hung = [each for each in tries if self._hangs(each.host, each.at_s, each.at_s + _FOUND_OUT_S)]
        pools = Counter(each.host.partition("-")[0] for each in hung)
        return 0 if any(each.may_be_known for each in hung[1:]) else max(pools.values(), default=0)

    def _hangs(self, host: str, from_s: float, until_s: float) -> bool:
        """At some moment between these."""
        return any(name == host and begin_s <= until_s and end_s >= from_s for name, begin_s, end_s in self._stalls)


def nonce_of(job: str) -> str:
    """Of an engine's job, that of the request: `r<nonce>.<try>`."""
    return job.removeprefix("r").partition(".")[0]
