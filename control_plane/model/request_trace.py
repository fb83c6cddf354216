"""Where the time of one request went: stages that follow each other without a gap, on one monotonic clock. Pure.

A stage begins when it is entered and ends where the next one begins, so that stages add up to the whole, whatever is
forgotten between them. What a worker has measured by itself divides the stage that the router sees as one (`divide`).
A request costs some ten appends, a token none. What is recorded is bounded: beyond `MOST_STAGES` the last stage goes
on as `further`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

MOST_STAGES = 160
MOST_EVENTS = 160
# Of an event's detail, which may be a worker's own sentence.
_MOST_CHARACTERS = 200


class TraceStage(StrEnum):
    """What the request waits for, or what is done for it; the document of traces explains each in a line."""

    INTAKE = "intake"
    TOKENIZATION = "tokenization"
    ADMISSION = "admission"
    FIRST_CHOICE = "first_choice"
    PLACEMENT = "placement"
    INPUT = "input"
    PREFILL_CALL = "prefill_call"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL_COMPUTE = "prefill_compute"
    FIRST_TOKEN = "first_token"
    DECODE_PLACEMENT = "decode_placement"
    DECODE_CALL = "decode_call"
    PULL = "pull"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"
    COMPLETION = "completion"
    FURTHER = "further"


class Mark(NamedTuple):
    """A stage begins. attempt: workers that the request had left before."""

    stage: TraceStage
    began_s: float
    worker_id: str
    attempt: int


class Interval(NamedTuple):
    """One stage. migrates: part of the pause in which an answer that had begun went on elsewhere."""

    stage: TraceStage
    began_s: float
    ended_s: float
    worker_id: str
    attempt: int
    migrates: bool


class Happened(NamedTuple):
    """An event; detail: for people."""

    at_s: float
    name: str
    detail: str


class Answered(NamedTuple):
    """What came of the request. route: the message."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    route: Any


class ParentSpan(NamedTuple):
    """The caller's own span, by `traceparent`."""

    trace_id: int
    span_id: int
    is_sampled: bool


@dataclass(slots=True)
class RequestTrace:
    """Of one answer. Whoever has not begun it records into nothing that is kept."""

    began_s: float = 0.0
    request_id: str = ""
    tenant: str = ""
    priority: int = 0
    # "request", "session" or "resumed".
    kind: str = "request"
    parent: ParentSpan | None = None
    trace_id: int = 0
    # Of the span of the whole request.
    span_id: int = 0
    # Drawn by rate, or wished for by the caller: it is exported, however it goes.
    is_sampled: bool = False
    # By the rules of export, once it has ended.
    is_exported: bool = False
    marks: list[Mark] = field(default_factory=list)
    events: list[Happened] = field(default_factory=list)
    # From when on its client waits for the first token: its arrival, and of a session its finish.
    asked_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    ended_unix_s: float = 0.0
    # How it ended; empty while it runs.
    outcome: str = ""
    answered: Answered | None = None
    # Of the second choice and after.
    choices: list["RequestTrace"] = field(default_factory=list)
    _attempt: int = 0

    def begin(self, now_s: float) -> None:
        """The request has arrived; what was recorded before is not its."""
        self.began_s = self.asked_s = now_s
        self.marks = [Mark(TraceStage.INTAKE, now_s, "", 0)]

    def another_choice(self) -> "RequestTrace":
        """Of one more answer to the same prompt, which was one request until now."""
        other = RequestTrace(
            self.began_s,
            trace_id=self.trace_id,
            span_id=self.span_id,
            is_sampled=self.is_sampled,
            priority=self.priority,
            asked_s=self.asked_s,
            marks=list(self.marks),
        )
        self.choices.append(other)
        return other

    @property
    def stage(self) -> TraceStage | None:
        return self.marks[-1].stage if self.marks else None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.asked_s

    @property
    def is_resumed(self) -> bool:
        """Its answer had begun at another router: what it waited for here was not its first token."""
        return self.kind == "resumed" or (self.answered is not None and self.answered.route.resumed_tokens > 0)

    def enter(self, stage: TraceStage, now_s: float, worker_id: str = "") -> None:
        """The stage before ends with that. The same stage at the same worker once more is no new one."""
        marks = self.marks
        if len(marks) >= MOST_STAGES:
            return
        if len(marks) == MOST_STAGES - 1:
            stage, worker_id = TraceStage.FURTHER, ""
        if marks and marks[-1].stage is stage and marks[-1].worker_id == worker_id:
            return
        marks.append(Mark(stage, now_s, worker_id, self._attempt))

    def divide(self, now_s: float, *parts: tuple[TraceStage, float]) -> None:
        """The last part of the stage that ends now was these, in order and in seconds; what is left keeps its name.

        Who measured them has another clock: what would begin before the stage is cut off.
        """
        if not self.marks:
            return
        first_s, worker_id = self.marks[-1].began_s, self.marks[-1].worker_id
        begins: list[tuple[TraceStage, float]] = []
        for stage, took_s in reversed(parts):
            began_s = max(first_s, now_s - max(took_s, 0.0))
            if began_s < now_s:
                begins.append((stage, began_s))
            now_s = began_s
        for stage, began_s in reversed(begins):
            self.enter(stage, began_s, worker_id)

    def input_finished(self, now_s: float) -> None:
        """The prompt of a session is whole: from now on its client waits."""
        self.asked_s = now_s
        if self.stage is TraceStage.INPUT:
            self.enter(TraceStage.PREFILL_CALL, now_s, self.marks[-1].worker_id)

    def has_token(self, now_s: float) -> None:
        """Counts once."""
        if self.first_token_s is None:
            self.first_token_s = now_s

    def left_worker(self, now_s: float, detail: str, *, handed_over: bool = False) -> None:
        """A worker was lost, or has handed the answer over; what follows is another attempt."""
        self._attempt += 1
        self.happened(now_s, "handed_over" if handed_over else "worker_lost", detail)
        if self.stage is TraceStage.DECODE:
            self.happened(now_s, "migration", "")

    def happened(self, at_s: float, name: str, detail: str) -> None:
        if len(self.events) < MOST_EVENTS:
            self.events.append(Happened(at_s, name, detail[:_MOST_CHARACTERS]))

    def end(self, now_s: float, outcome: str) -> None:
        self.ended_s, self.outcome = now_s, outcome
        for choice in self.choices:
            choice.end(now_s, outcome)

    @property
    def migrations(self) -> int:
        return sum(event.name == "migration" for event in self.events)

    def intervals(self, now_s: float) -> Iterator[Interval]:
        """Its stages, in order; the last one ends with the request, or now. None has no length."""
        ends = [mark.began_s for mark in self.marks[1:]]
        ends.append(now_s if self.ended_s is None else self.ended_s)
        left_s = sorted(event.at_s for event in self.events if event.name == "migration")
        for mark, ended_s in zip(self.marks, ends, strict=True):
            # An answer decodes until it migrates, and the pause lasts until it decodes again.
            migrates = mark.stage is not TraceStage.DECODE and self._is_in_pause(mark, left_s)
            if ended_s > mark.began_s:
                yield Interval(mark.stage, mark.began_s, ended_s, mark.worker_id, mark.attempt, migrates)

    def _is_in_pause(self, mark: Mark, left_s: list[float]) -> bool:
        last_s = max((at_s for at_s in left_s if at_s <= mark.began_s), default=None)
        if last_s is None:
            return False
        return not any(each.stage is TraceStage.DECODE and last_s < each.began_s <= mark.began_s for each in self.marks)

    def check_invariants(self) -> None:
        """Stages are in order and fill the time from the beginning to the end."""
        began = [mark.began_s for mark in self.marks]
        assert began == sorted(began) and began[:1] == [self.began_s]
        assert len(self.marks) <= MOST_STAGES and len(self.events) <= MOST_EVENTS
        if self.ended_s is not None:
            whole_s = self.ended_s - self.began_s
            assert abs(sum(each.ended_s - each.began_s for each in self.intervals(self.ended_s)) - whole_s) < 1e-9
