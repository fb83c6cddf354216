"""What is reported of the decode batch: counters with each step, which costs microseconds, and details on request."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster_core.engine_reports import DecodeBatch, DecodeReport, PrefixGroup, WaitingRequest
from decode_worker.batch_members import Cause, Member
from decode_worker.batching import Batching
from decode_worker.chunk_hashes import ChunkHash
from decode_worker.chunked_hash_tree import ChunkedHashTree

_HASH_DIGITS = 8


@dataclass(slots=True)
class StepCounters:
    """Since the start, of steps that computed something."""

    steps: int = 0
    batch_sum: int = 0
    shared_tokens_sum: int = 0
    # What all of this costs, from a request's arrival on, also in steps that computed nothing.
    decision_s: float = 0.0

    def executed(self, size: int, shared_tokens: int) -> None:
        self.steps += 1
        self.batch_sum += size
        self.shared_tokens_sum += shared_tokens

    def planned(self, took_s: float) -> None:
        self.decision_s += took_s


def decode_report(scheduler: Any) -> DecodeReport:
    """Of a scheduler with `decode_worker.batch_scheduling`."""
    steps: StepCounters = scheduler.batch_counters
    batching: Batching | None = scheduler.batching
    if batching is None:
        waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        return DecodeReport(
            policy="fcfs", mode="policy", running_requests=len(scheduler.running), loading_requests=0, tip_tokens=0,
            working_set_tokens=0, waiting={Cause.CAPACITY.value: waiting}, steps=steps.steps, batch_sum=steps.batch_sum,
            shared_tokens_sum=0,
            admissions={}, lost_tokens=0, wait_s={}, longest_held_s=0.0, decisions=0, decision_s=0.0, probes=0,
            fallbacks=0,
        )  # fmt: skip
    counters, chunk_tokens = batching.counters, scheduler.chunk_tokens
    return DecodeReport(
        policy=batching.policy.name,
        mode=scheduler.batch_mode,
        running_requests=len(scheduler.running),
        loading_requests=batching.loading_requests,
        tip_tokens=batching.tree.tip_chunks * chunk_tokens,
        working_set_tokens=batching.tree.working_set_chunks * chunk_tokens,
        waiting={cause.value: number for cause, number in batching.waiting_by_cause().items()},
        steps=steps.steps,
        batch_sum=steps.batch_sum,
        shared_tokens_sum=steps.shared_tokens_sum,
        admissions={reason.value: number for reason, number in counters.admissions.items()},
        lost_tokens=counters.lost_chunks * chunk_tokens,
        wait_s={cause.value: seconds for cause, seconds in counters.wait_s.items()},
        longest_held_s=counters.longest_held_s,
        decisions=counters.decisions,
        decision_s=steps.decision_s,
        probes=scheduler.guard.probes,
        fallbacks=scheduler.guard.fallbacks,
    )


def decode_batch(scheduler: Any, at_most: int, now_s: float) -> DecodeBatch:
    """The batch by shared prefix, those that wait longest, and what the policy has learned. O(waiting)."""
    batching: Batching | None = scheduler.batching
    if batching is None:
        return DecodeBatch()
    groups = tuple(_groups(batching, scheduler.chunk_tokens))
    longest: dict[str, float] = {}
    waiting: list[WaitingRequest] = []
    for member in batching.waiting():
        waited_s, cause = now_s - member.arrived_s, member.cause.value
        longest[cause] = max(longest.get(cause, 0.0), waited_s)
        if len(waiting) < at_most:
            waiting.append(_waiting(member, waited_s, scheduler, batching))
    return DecodeBatch(groups[:at_most], tuple(waiting), tuple(batching.policy.table()), longest)


def _groups(batching: Batching, chunk_tokens: int) -> Iterator[PrefixGroup]:
    """Of all requests in the batch, largest group first."""
    batch = ChunkedHashTree()
    for member in batching.batch():
        batch.insert(member.request_id, member.hashes)
        batch.add_to_batch(member.request_id)
    for share in sorted(batch.shares(), key=lambda each: -each.active):
        waiting = batching.tree.waiting_with(share.prefix) if share.prefix else 0
        yield PrefixGroup(_short(share.prefix), len(share.prefix) * chunk_tokens, share.active, waiting)


def _waiting(member: Member, waited_s: float, scheduler: Any, batching: Batching) -> WaitingRequest:
    return WaitingRequest(
        request_id=member.request_id,
        prompt_tokens=scheduler.requests[member.request_id].num_prompt_tokens,
        waited_s=waited_s,
        cause=member.cause.value,
        shared_tokens=batching.tree.shared_chunks(member.request_id) * scheduler.chunk_tokens,
        priority=member.priority,
    )


def _short(prefix: Sequence[ChunkHash]) -> str:
    if not prefix:
        return ""
    last = prefix[-1]
    return (last.hex() if isinstance(last, bytes) else f"{last:016x}")[:_HASH_DIGITS]
