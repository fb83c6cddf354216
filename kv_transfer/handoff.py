"""The rules of a hand-off, pure: its deadline, and what counts as too late.

vLLM leases the blocks of a finished prefill for `lease_s` and gives them to other requests afterwards; a pull that
is late reads those silently (measured with vLLM 0.32). So a hand-off has a deadline of its own, well before the end
of its lease, stamped by the prefill worker and checked by the decode worker before the pull starts and after it
ended. What is late is recomputed, never used.
"""

from dataclasses import dataclass

from cluster_core.clock import UnixMs
from cluster_core.engine import HandoffOutcome, HandoffReport

# Keys that Rachis adds to vLLM's `kv_transfer_params`; vLLM passes them through untouched.
DEADLINE_PARAM = "rachis_deadline_unix_ms"
# Key in `SamplingParams.extra_args` that carries a first token to be replayed.
FIRST_TOKEN_ARG = "rachis_first_token"

# A deadline is at most this part of the lease; the rest covers clock skew and a pull under way.
MAX_DEADLINE_SHARE = 0.5


def stamp_deadline(now: UnixMs, deadline_s: float) -> UnixMs:
    """The deadline of a hand-off whose prefill ended `now`."""
    return UnixMs(now + round(deadline_s * 1000))


def effective_deadline(stamped: UnixMs, received: UnixMs, deadline_s: float) -> UnixMs:
    """The deadline as the decode worker sees it.

    A prefill host whose clock runs ahead stamps a deadline too far away: none lies further than `deadline_s` after
    the hand-off was received.
    """
    return UnixMs(min(stamped, stamp_deadline(received, deadline_s)))


def is_late(deadline: UnixMs, now: UnixMs) -> bool:
    return now >= deadline


@dataclass(slots=True)
class Pull:
    """One pull, from the moment the engine asks for blocks. Times in seconds of one monotonic clock."""

    started_s: float
    tokens: int
    kv_bytes: int
    ended_s: float | None = None
    failed: bool = False

    def report(self) -> HandoffReport:
        """What came of it; only meaningful once it has ended."""
        elapsed_ms = ((self.ended_s or self.started_s) - self.started_s) * 1000
        if self.failed:
            return HandoffReport(HandoffOutcome.RECOMPUTED, transfer_ms=elapsed_ms)
        return HandoffReport(HandoffOutcome.PULLED, self.kv_bytes, self.tokens, elapsed_ms)


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

    def end(self, request_id: str, now_s: float, *, failed: bool) -> None:
        pull = self._pulls.get(request_id)
        if pull is not None and pull.ended_s is None:
            pull.ended_s, pull.failed = now_s, failed

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
