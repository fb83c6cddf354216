"""One session's ledger: what came in, what was computed, found and thrown away, and what happened when.

Pure: times come in as monotonic seconds. A session's prompt itself lies in the engine's request.
Source: Stream2LLM section 4.2; the event names are those of its published code.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from cluster_core.engine_jobs import SessionEvent, SessionEventKind, SessionMode, SessionProgress, SessionRecord

# Of a very long session so many first and so many last events are kept.
EVENTS_KEPT = 64


@dataclass(slots=True)
class SessionLedger:
    """Written by the scheduler that owns the session's request."""

    mode: SessionMode
    opened_s: float
    tokens: SessionProgress = field(default_factory=SessionProgress)
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    preempted: bool = False
    queued: bool = False
    finished: bool = False
    cached_tokens: int = 0
    _had_tokens: int = 0
    # Found when it was admitted, and loaded since: for the next step that computes any of it.
    _found_tokens: int = 0
    _first: list[SessionEvent] = field(default_factory=list)
    _last: deque[SessionEvent] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    def note(self, kind: SessionEventKind, now_s: float, tokens: int) -> None:
        event = SessionEvent(kind, now_s - self.opened_s, tokens)
        (self._first if len(self._first) < EVENTS_KEPT else self._last).append(event)

    def opened(self, prompt_tokens: int) -> None:
        self.tokens = replace(self.tokens, received_tokens=prompt_tokens, prompt_tokens=prompt_tokens)
        self.wait(self.opened_s)

    def received(self, new_tokens: int, prompt_tokens: int) -> None:
        """One append or update was taken in."""
        before = self.tokens
        self.tokens = replace(
            before,
            received_tokens=before.received_tokens + new_tokens,
            prompt_tokens=prompt_tokens,
            inputs=before.inputs + 1,
        )

    def closed(self, new_tokens: int, prompt_tokens: int) -> None:
        """The input was closed, with these last tokens."""
        before = self.tokens
        self.tokens = replace(before, received_tokens=before.received_tokens + new_tokens, prompt_tokens=prompt_tokens)

    def kept(self, tokens: int) -> None:
        """An update left the KV of these tokens as it was."""
        self.tokens = replace(self.tokens, reused_tokens=self.tokens.reused_tokens + tokens)

    def wait(self, now_s: float) -> None:
        """There are tokens to compute."""
        if not self.queued:
            self.queued = True
            self.note(SessionEventKind.QUEUED, now_s, self.tokens.prompt_tokens)

    def found(self, tokens: int) -> None:
        """So many were found when it was admitted, and it waits for what of them lies in host memory."""
        self._found_tokens = tokens

    def scheduled(self, found_tokens: int, computed_tokens: int, reached_tokens: int, now_s: float) -> None:
        """A step computes these many tokens of it, after these many were found when it was admitted.

        reached_tokens: how much of the prompt has its KV after the step.
        """
        found_tokens = max(found_tokens, min(self._found_tokens, reached_tokens - computed_tokens))
        self._found_tokens = 0
        # What it finds beyond what it has had itself is others' work.
        self.cached_tokens += max(0, found_tokens - self._had_tokens)
        self._had_tokens = max(self._had_tokens, reached_tokens)
        if self.queued:
            self.queued = False
            self.note(SessionEventKind.SCHEDULED, now_s, computed_tokens)
        if self.preempted:
            self.preempted = False
            self.note(SessionEventKind.RESUMED, now_s, found_tokens)
        before = self.tokens
        self.tokens = replace(
            before,
            reused_tokens=before.reused_tokens + found_tokens,
            computed_tokens=before.computed_tokens + computed_tokens,
        )

    def shortened(self, tokens: int) -> None:
        """At most so many tokens in front of the prompt are still those of before."""
        self.cached_tokens = min(self.cached_tokens, tokens)
        self._had_tokens = min(self._had_tokens, tokens)
        self._found_tokens = min(self._found_tokens, tokens)

    def caught_up(self, now_s: float) -> None:
        """The KV of all input so far is on the device."""
        self.note(SessionEventKind.KV_ON_DEVICE, now_s, self.tokens.ready_tokens)

    def invalidated(self, tokens: int, now_s: float) -> None:
        if tokens:
            self.tokens = replace(self.tokens, invalidated_tokens=self.tokens.invalidated_tokens + tokens)
            self.note(SessionEventKind.INVALIDATED, now_s, tokens)

    def preempt(self, *, swapped: bool, tokens: int, now_s: float) -> None:
        if swapped:
            self.preemptions_swap += 1
            self.note(SessionEventKind.PREEMPTED_SWAP, now_s, tokens)
        else:
            self.preemptions_recompute += 1
            self.note(SessionEventKind.PREEMPTED_RECOMPUTE, now_s, tokens)
        self.preempted = True
        self.queued = False

    def finish(self, now_s: float) -> None:
        """Its first token was sampled."""
        if not self.finished:
            self.finished = True
            self.ready(self.tokens.prompt_tokens)
            self.note(SessionEventKind.FINISHED, now_s, self.tokens.prompt_tokens)

    def ready(self, tokens: int) -> None:
        if tokens != self.tokens.ready_tokens:
            self.tokens = replace(self.tokens, ready_tokens=tokens)

    def record(self) -> SessionRecord:
        return SessionRecord(
            self.tokens, self.preemptions_swap, self.preemptions_recompute, (*self._first, *self._last)
        )
