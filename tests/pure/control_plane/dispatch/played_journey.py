"""A journey played by a driver that knows what may become of a lease, and checks every instruction against that.

The model of a lease, from the prefill call on:
    held        the prefill worker may keep the KV; nobody was told
    told        a decode worker may pull it until `told_s` + the hand-off deadline, whatever the router hears of it
    ended       pulled by that worker, or never made because the answer ended with its first token
    released    the prefill worker was told to drop it, at a time at which nobody pulls any more
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.ids import RequestId, WorkerId
from control_plane.dispatch import journey_steps as steps
from control_plane.dispatch.exclusions import MOST_FAILURES, MOST_STALLS
from control_plane.dispatch.journey import MOST_DEATHS, Journey, JourneyLimits
from control_plane.dispatch.journey_steps import Stage
from control_plane.model.job import RECOMPUTED, Job
from control_plane.model.lifecycle import Event, RequestLifecycle
from control_plane.model.worker_snapshot import WorkerSnapshot

CallT = TypeVar("CallT")
PULLED = generation.HANDOFF_OUTCOME_PULLED
FIRST = "first"
MORE = "more"
LIMITS = JourneyLimits(prefill_attempts=2, worker_wait_s=30.0, handoff_deadline_s=15.0)


def worker(name: str, generation_number: int = 1) -> WorkerSnapshot:
    pool = wire.POOL_PREFILL if name.startswith("prefill") else wire.POOL_DECODE
    return WorkerSnapshot(WorkerId(name), generation_number, pool, f"{name}:1")


def new_job(*, max_tokens: int = 8, deadline_s: float = 600.0) -> Job:
    lifecycle = RequestLifecycle(RequestId("r"))
    lifecycle.at(Event.ADMITTED)
    sampling = generation.SamplingParams(max_tokens=max_tokens)
    return Job(RequestId("r"), [1, 2, 3], sampling, lifecycle, arrived_s=0.0, deadline_s=deadline_s, nonce="")


@dataclass(slots=True)
class ModelLease:
    lease_id: str
    told_s: float | None = None
    # The worker that was told has said itself that it does not pull.
    given_up: bool = False
    # The worker that was told was lost: it may have used the lease up.
    may_be_used_up: bool = False
    ended: bool = False
    released: bool = False

    def safe_at_s(self, deadline_s: float) -> float:
        return 0.0 if self.told_s is None or self.given_up else self.told_s + deadline_s


@dataclass(slots=True)
class PlayedJourney:
    """`tell` hands the journey an event and checks what it answers; `call` is what it waits for."""

    journey: Journey
    limits: JourneyLimits
    now_s: float = 0.0
    call: steps.Instruction | None = None
    leases: dict[str, ModelLease] = field(default_factory=dict)
    emitted: list[str] = field(default_factory=list)
    endings: list[steps.Instruction] = field(default_factory=list)
    failed_prefill: set[tuple[str, int]] = field(default_factory=set)
    failed_decode: set[tuple[str, int]] = field(default_factory=set)
    # Those that get it again where there is no other, and how often they failed.
    broken_decode: Counter[tuple[str, int]] = field(default_factory=Counter)
    losses: int = 0
    deaths: int = 0
    blamed: int = 0
    # Decode workers that were lost since something has come of one; such that drain do not count.
    fruitless: int = 0
    # Those that were left because they hang, in the same time.
    hung: list[tuple[str, int]] = field(default_factory=list)
    # Tokens of the answer that workers have told.
    told_tokens: int = 0
    decode_started: bool = False
    closed: bool = False

    @classmethod
    def begun(cls, job: Job | None = None, limits: JourneyLimits = LIMITS) -> "PlayedJourney":
        played = cls(Journey(job or new_job(), limits), limits)
        played.tell(steps.Begun())
        return played

    @property
    def deadline_s(self) -> float:
        return self.limits.handoff_deadline_s

    def tell(self, event: steps.Event) -> tuple[steps.Instruction, ...]:
        self._note_event(event)
        answered = self.call
        instructions = self.journey.handle(event, self.now_s)
        if not isinstance(event, steps.DecodeStarted | steps.Generated):
            self.call = None
        for instruction in instructions:
            self._check(instruction)
        if isinstance(event, steps.DecodeStarted | steps.Generated):
            assert self.call is answered
        self.journey.check_invariants()
        return instructions

    @property
    def left_for_good(self) -> set[tuple[str, int]]:
        return set(self.hung) if len(self.hung) >= MOST_STALLS else set()

    def waits_for(self, kind: type[CallT]) -> CallT:
        """The call that the journey waits for, which is of that kind."""
        assert isinstance(self.call, kind), self.call
        return self.call

    def close(self) -> None:
        self.closed = True
        self.tell(steps.Closed())
        assert self.journey.stage is Stage.OVER
        assert self.deaths == self.blamed, "an engine died, and nobody is blamed"
        for lease in self.leases.values():
            assert lease.ended or lease.released, f"lease {lease.lease_id} is lost"

    def _note_event(self, event: steps.Event) -> None:
        call = self.call
        match event:
            case steps.Prefilled(token_ids=tokens, finish_reason=reason):
                assert isinstance(call, steps.CallPrefill)
                self.told_tokens += len(tokens)
                self.leases[call.lease_id].ended = reason is not None
            case steps.Generated(token_ids=tokens):
                self.told_tokens += len(tokens)
                self.fruitless = 0
                self.hung.clear()
            case steps.DecodeStarted(handoff=handoff):
                self.decode_started = True
                for lease in self._held():
                    lease.ended = handoff == PULLED
                    lease.given_up |= handoff == RECOMPUTED
            case steps.HandedOver(lease_id=lease_id):
                assert isinstance(call, steps.CallDecode)
                assert not self._held(), "a second lease while the first is held"
                self.leases[lease_id] = ModelLease(lease_id)
                self.decode_started = False
                self.failed_decode = {(call.worker.worker_id, call.worker.generation)}
                self.broken_decode.clear()
            case steps.WorkerLost(has_died=has_died) if not self.endings:
                assert isinstance(call, steps.CallPrefill | steps.CallDecode)
                failed = self.failed_prefill if isinstance(call, steps.CallPrefill) else self.failed_decode
                who = (call.worker.worker_id, call.worker.generation)
                if isinstance(call, steps.CallDecode) and (event.was_left or event.has_stalled):
                    # It was left for those that this call might go to.
                    failed.clear()
                    self.broken_decode.clear()
                    failed |= self.left_for_good
                    self.hung += [who] * event.has_stalled
                elif event.was_left:
                    failed.clear()
                is_gone = event.is_draining or event.has_died or event.has_stalled or event.lacks_adapter
                if isinstance(call, steps.CallDecode) and not is_gone and self.broken_decode[who] + 1 < MOST_FAILURES:
                    self.broken_decode[who] += 1
                else:
                    del self.broken_decode[who]
                    failed.add(who)
                self.losses += event.is_attempt
                if isinstance(call, steps.CallDecode):
                    self.fruitless += event.is_attempt and not event.has_stalled
                if self.decode_started:
                    # The answer goes on elsewhere, from the beginning.
                    self.decode_started = False
                    self.failed_prefill.clear()
                    self.failed_decode.clear()
                    self.broken_decode.clear()
                self.deaths += has_died
                if isinstance(call, steps.CallDecode) and call.pulls and event.may_have_pulled:
                    for lease in self._held():
                        lease.may_be_used_up = True

    def _held(self) -> list[ModelLease]:
        return [lease for lease in self.leases.values() if not lease.ended and not lease.released]

    def _check(self, instruction: steps.Instruction) -> None:
        if not isinstance(instruction, steps.Release | steps.Suspect | steps.MarkDraining | steps.Blame):
            assert not self.closed and not self.endings, f"{instruction} after the end"
        match instruction:
            case steps.Route() | steps.AwaitPrompt():
                self._begins(instruction)
            case steps.PlacePrefill(excluded):
                assert excluded == self.failed_prefill
                self._begins(instruction)
            case steps.PlaceDecode(excluded=excluded, avoided=avoided):
                assert excluded == self.failed_decode
                assert avoided == set(self.broken_decode)
                assert 0 < instruction.most_s(self.now_s) <= self.journey.job.deadline_s - self.now_s
                self._begins(instruction)
            case steps.CallPrefill(lease_id=lease_id):
                assert lease_id not in self.leases, "two calls under one name"
                assert not self._held(), "a second lease while the first is held"
                self.leases[lease_id] = ModelLease(lease_id)
                self._calls(instruction)
            case steps.CallDecode(pulls=pulls):
                assert instruction.request_id not in self.leases, "two calls under one name"
                if pulls:
                    (lease,) = self._held()
                    assert not lease.may_be_used_up, "a lease is used a second time"
                    lease.told_s = self.now_s
                self._calls(instruction)
            case steps.Emit(piece):
                assert piece not in self.emitted or piece == MORE, "the first token comes twice"
                self.emitted.append(piece)
            case steps.Release(lease=released):
                lease = self.leases[released.lease_id]
                assert not lease.ended and not lease.released, "released twice, or after it had ended"
                assert released.safe_at_s >= lease.safe_at_s(self.deadline_s), "released while it may still be pulled"
                lease.released = True
            case steps.Blame():
                self.blamed += 1
            case steps.Fail(cause=steps.Cause.DECODE_WORKER_LOST):
                was_tried = self.fruitless >= self.limits.decode_attempts
                assert was_tried or self.journey.job.migrations >= self.limits.max_migrations, "given up early"
                self.endings.append(instruction)
            case steps.Complete() | steps.Fail():
                self.endings.append(instruction)

    def _calls(self, call: steps.CallPrefill | steps.CallDecode) -> None:
        assert self.now_s < call.until_s == self.journey.job.deadline_s
        assert self.fruitless < self.limits.decode_attempts, "it is tried for ever"
        if isinstance(call, steps.CallDecode):
            assert call.hung == self.left_for_good, "workers that hang are gone back to for ever"
        assert self.journey.job.emitted == list(range(self.told_tokens)), "a worker does not get the answer so far"
        self._begins(call)

    def _begins(self, call: steps.Instruction) -> None:
        assert self.deaths < MOST_DEATHS, f"{call} after {self.deaths} deaths"
        assert self.call is None, f"{call} while {self.call} is under way"
        self.call = call


P0, P1, D0, D1, D2 = (worker(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"))
FINISHED = 1


def prefilled(played: PlayedJourney | None = None) -> PlayedJourney:
    """A request whose first token has come, and that is placed for decode next."""
    played = played or PlayedJourney.begun()
    played.tell(steps.Placed(P0))
    played.tell(steps.Prefilled(FIRST, (0,), 1))
    return played


def decoding(played: PlayedJourney | None = None) -> PlayedJourney:
    """As `prefilled`, and the decode worker has been called."""
    played = prefilled(played)
    played.tell(steps.Placed(D0))
    return played
