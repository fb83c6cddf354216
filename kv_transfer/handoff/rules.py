"""The rules of a hand-off, pure: its deadline, and what counts as too late.

vLLM leases the blocks of a finished prefill for `lease_s` and gives them to other requests afterwards; a pull that
is late reads those silently (measured with vLLM 0.32). So a hand-off has a deadline of its own, well before the end
of its lease, stamped by the prefill worker and checked by the decode worker before the pull starts and after it
ended. What is late is recomputed, never used.

It travels as time of the cluster's clock (`cluster_core.clock.ClusterClock`), which both hosts know whatever their own
clocks say. From its arrival on it is a time on the monotonic clock of the decode worker's host, which all processes of
that host share and which is never set.
"""

from dataclasses import dataclass

from cluster_core.clock import UnixMs
from cluster_core.engine_jobs import HandoffOutcome, HandoffReport

# Keys that Rachis adds to vLLM's `kv_transfer_params`; vLLM passes them through untouched.
DEADLINE_PARAM = "rachis_pull_deadline_s"

# A deadline is at most this part of the lease; the rest covers what the clocks are off by, and a pull under way.
MAX_DEADLINE_SHARE = 0.5


def stamp_deadline(now: UnixMs, deadline_s: float) -> UnixMs:
    """The deadline of a hand-off whose prefill ended `now`, by the cluster's clock."""
    return UnixMs(now + round(deadline_s * 1000))


def effective_deadline_s(stamped: UnixMs, received: UnixMs, received_s: float, deadline_s: float) -> float:
    """The deadline as the decode worker keeps it, on the monotonic clock.

    received, received_s: when the hand-off arrived, by the cluster's clock and by the monotonic one. Should the two
    workers not agree on the cluster's time, a deadline may be stamped too far away: none lies further than `deadline_s`
    after the arrival.
    """
    return received_s + min((stamped - received) / 1000, deadline_s)


def is_late(deadline_s: float, now_s: float) -> bool:
    return now_s >= deadline_s


@dataclass(slots=True)
class Pull:
    """One pull, from the moment the engine asks for blocks. Times in seconds of one monotonic clock."""

    started_s: float
    tokens: int
    kv_bytes: int
    ended_s: float | None = None
    failed: bool = False
    kv_descriptors: int = 0

    def report(self) -> HandoffReport:
        """What came of it; only meaningful once it has ended."""
        elapsed_ms = ((self.ended_s or self.started_s) - self.started_s) * 1000
        if self.failed:
            return HandoffReport(HandoffOutcome.RECOMPUTED, transfer_ms=elapsed_ms)
        return HandoffReport(HandoffOutcome.PULLED, self.kv_bytes, self.tokens, elapsed_ms, self.kv_descriptors)


class PullLedger:
    """The pulls of one decode engine by request, until their reports are taken. Owned by the engine thread."""

    def __init__(self) -> None:
        self._pulls: dict[str, Pull] = {}
        self._dropped: set[str] = set()

    def start(self, request_id: str, now_s: float, tokens: int, kv_bytes: int) -> None:
        self._pulls[request_id] = Pull(now_s, tokens, kv_bytes)

    def drop(self, request_id: str) -> None:
        """The request's deadline passed before its pull began."""
        self._dropped.add(request_id)

    def end(self, request_id: str, now_s: float, *, failed: bool, descriptors_per_byte: float = 0.0) -> None:
        """descriptors_per_byte: of the pulls that end now, together."""
        pull = self._pulls.get(request_id)
        if pull is not None and pull.ended_s is None:
            pull.ended_s, pull.failed = now_s, failed
            pull.kv_descriptors = round(pull.kv_bytes * descriptors_per_byte)

    def take(self, request_id: str) -> HandoffReport:
        """The report of a request that computes now. Nothing known means that its blocks were all local."""
        pull = self._pulls.pop(request_id, None)
        if request_id in self._dropped:
            self._dropped.discard(request_id)
            return HandoffReport(HandoffOutcome.RECOMPUTED)
        return pull.report() if pull is not None else HandoffReport(HandoffOutcome.LOCAL)

    def forget(self, request_id: str) -> None:
        self._pulls.pop(request_id, None)
        self._dropped.discard(request_id)

    def __len__(self) -> int:
        return len(self._pulls) + len(self._dropped)
