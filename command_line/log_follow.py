"""What `rachis logs --follow` asks for next, and what of an answer is new: pure, the command asks and prints.

Each host is asked from where its own clock stood when it was read last, so hosts whose clocks differ neither lose nor
repeat events. An event is written a moment after it happened: what came so late is asked for again, and known by what
is remembered. Remembered is what may be told again, which is as much as one answer holds and a few seconds more.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.log_files import MOST_EVENTS

# Between an event and its line in a file that is read: a host takes no longer to answer than that, either.
LATE_MS = 5_000
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class News:
    """sentences: what is to be said beside the events."""

    events: Sequence[wire.LogEvent]
    sentences: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Seen:
    """An event, and how many that are the same to the letter."""

    node: str
    unix_ms: int
    times: int


class Following:
    """first: the answer to `query`, whose events and sentences have been shown."""

    def __init__(self, query: wire.LogQuery, first: admin.GetLogsResponse) -> None:
        self.pause_s = FIRST_PAUSE_S
        self._query = wire.LogQuery()
        self._query.CopyFrom(query)
        self._query.most_events = MOST_EVENTS
        # What a host that comes later has said since the first answer is new, too.
        self._query.since_unix_ms = min((_late(source) for source in first.sources), default=0)
        self._since_ms: dict[str, int] = {}
        self._seen: dict[bytes, _Seen] = {}
        self._missing: frozenset[str] = frozenset()
        self.news(first)

    def request(self) -> admin.GetLogsRequest:
        return admin.GetLogsRequest(query=self._query, since_unix_ms=self._since_ms)

    def news(self, told: admin.GetLogsResponse) -> News:
        """Of an answer to `request`: what was not told before."""
        times: Counter[bytes] = Counter()
        new = []
        for event in told.events:
            key = event.SerializeToString(deterministic=True)
            times[key] += 1
            if key not in self._seen or times[key] > self._seen[key].times:
                new.append(event)
        lost = self._lost(told, times)
        self._remember(told.events, times)
        self._advance(told)
        sentences = [sentence for sentence in told.missing if sentence not in self._missing]
        self._missing = frozenset(told.missing)
        if lost:
            sentences.append(
                f"{lost:,} events more came than are told at once ({MOST_EVENTS:,}): they are in the files, not here"
            )
        if self.pause_s > FIRST_PAUSE_S:
            self.pause_s = FIRST_PAUSE_S
            sentences.insert(0, "the router answers again")
        return News(new, sentences)

    def failed(self, why: str) -> Sequence[str]:
        """The router did not answer. What is to be said of it: once, until it answers again."""
        is_first = self.pause_s == FIRST_PAUSE_S
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        if not is_first:
            return ()
        return (f"the router does not answer: {why}; it is asked again, every {LONGEST_PAUSE_S:g} s in the end",)

    def _lost(self, told: admin.GetLogsResponse, times: Counter[bytes]) -> int:
        """Of the events that were left out, those that were not shown before."""
        answered = {source.node for source in told.sources}
        known = sum(max(0, seen.times - times[key]) for key, seen in self._seen.items() if seen.node in answered)
        return max(0, sum(source.left_out for source in told.sources) - known)

    def _remember(self, events: Sequence[wire.LogEvent], times: Counter[bytes]) -> None:
        for event in events:
            key = event.SerializeToString(deterministic=True)
            before = self._seen[key].times if key in self._seen else 0
            self._seen[key] = _Seen(event.node, event.unix_ms, max(before, times[key]))

    def _advance(self, told: admin.GetLogsResponse) -> None:
        """Where some were left out, nothing that is older than those that were told is asked for again."""
        for source in told.sources:
            since_ms = _late(source)
            if source.left_out:
                own = (event.unix_ms for event in told.events if event.node == source.node)
                since_ms = max(since_ms, min(own, default=source.read_unix_ms))
            self._since_ms[source.node] = since_ms
        self._seen = {key: seen for key, seen in self._seen.items() if seen.unix_ms >= self._since_ms.get(seen.node, 0)}


def _late(source: admin.LogSource) -> int:
    return max(0, source.read_unix_ms - LATE_MS)
