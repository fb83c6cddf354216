"""The workers that placement chooses from, frozen: one pool at one moment, in columns with a row for each worker."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rachis.v1 import worker_pb2 as wire

from control_plane.fleet.loads import Floats, Load
from control_plane.fleet.other_routers import Share
from control_plane.model.worker_snapshot import WorkerSnapshot

# Until any worker has measured what work costs, by field of `WorkerCosts`: the order of magnitude of an 8B model on a
# current GPU.
_ROUGH_COSTS = {
    "prefill_s": 0.0,
    "prefill_s_per_token": 1e-4,
    "prefill_s_per_pair": 0.0,
    "load_s_per_token": 5e-6,
    "pull_s": 0.01,
    "pull_s_per_token": 2e-6,
    "adapter_load_s": 0.2,
    "decode_s": 0.007,
    "decode_s_per_request": 2e-5,
    "decode_s_per_token": 5e-8,
}


# What is measured together: of one figure among them that is 0, the others say what it costs.
_COST_GROUPS = (
    ("prefill_s", "prefill_s_per_token", "prefill_s_per_pair"),
    ("load_s_per_token",),
    ("pull_s", "pull_s_per_token"),
    ("adapter_load_s",),
    ("decode_s", "decode_s_per_request", "decode_s_per_token"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """What registrations say of a pool's workers; changes with them alone."""

    workers: tuple[WorkerSnapshot, ...]
    # Of KV, in all and not in use.
    total_tokens: Floats
    free_tokens: Floats
    max_running_requests: Floats
    # Of any prefill, for each prompt token computed, and for each pair of such a token and one that it attends to.
    prefill_s: Floats
    prefill_s_per_token: Floats
    prefill_s_per_pair: Floats
    # From host memory.
    load_s_per_token: Floats
    # Of any pull, and for each token of it.
    pull_s: Floats
    pull_s_per_token: Floats
    adapter_load_s: Floats
    # Of a step that decodes: whatever it decodes, for each request, and for each token attended to.
    decode_s: Floats
    decode_s_per_request: Floats
    decode_s_per_token: Floats
    # Digests of those that are loaded.
    adapters: tuple[frozenset[str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Prefills:
    """Of one router, on each worker: the engine time of all, that of the longest, and since when none was over; and
    what other routers have in its queue, or had then, which keeps it without making it late."""

    pending_s: Floats
    longest_s: Floats
    since_s: Floats
    others_s: "Floats | float" = 0.0

    def left_s(self, pace: "Floats | float" = 1.0) -> Floats:
        """Of them, less what can have been done of one since the last one ended."""
        left_s: Floats = np.maximum(self.pending_s - np.minimum(self.since_s * pace, self.longest_s), 0.0)
        return left_s

    def late_s(self, pace: "Floats | float" = 1.0) -> Floats:
        """A worker that takes longer than that is late, and may be for as long again: so one that hangs gets ever
        less."""
        late_s = np.maximum(self.since_s * pace - self.longest_s - self.others_s, 0.0)
        return np.where(self.pending_s > 0, late_s, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """A pool's workers, what is fixed of them and what the routers have on each."""

    fixed: Fixed
    in_flight_requests: Floats
    # Of prompt and completion.
    in_flight_tokens: Floats
    # Of the prompts, what was not cached there.
    uncomputed_tokens: Floats
    # Until the prefills in flight are expected to be over.
    queue_s: Floats
    # The router's last placement there.
    turn: Floats
    # Of the requests in flight, those that decode, and those that will once they are prefilled: how many, and the
    # tokens that a step of theirs attends to.
    decoding: Floats
    decoding_tokens: Floats
    coming: Floats
    coming_tokens: Floats
    # Of the whole answers of both.
    answer_tokens: Floats
    # The prefills of this router, and what other routers have of them, as `queue_s`; of these what is not best effort.
    prefills: Prefills
    others_s: Floats
    ahead: Prefills
    others_ahead_s: Floats
    # Of best effort that is not prefilled yet, of all routers: requests and their tokens.
    overtaken: Floats
    overtaken_tokens: Floats
    # Requests whose prompts still arrived when they were sent, and of this router, until what had come of them is
    # expected to be computed.
    arriving: Floats
    arriving_s: Floats
    # Of this router, best effort that decodes or will.
    best_effort: Floats
    # Of the prompts of a request's class, what engines compute after it; None where nothing is left out.
    behind_s: "Floats | None" = None

    def queue_at_pace_s(self, pace: Floats, *, best_effort: bool) -> Floats:
        """What a request of that class waits for, in engine time, where workers have but a share of it for prefills. A
        worker that is late makes all wait; one that has best effort of this router alone is not late by that while
        others overtake it."""
        waits, others_s = (self.prefills, self.others_s) if best_effort else (self.ahead, self.others_ahead_s)
        late_s = self.prefills.late_s(pace)
        if not best_effort:
            late_s = np.where((self.ahead.pending_s <= 0) & (self.others_ahead_s > 0), 0.0, late_s)
        queue: Floats = waits.left_s(pace) + late_s + others_s
        if self.behind_s is not None:
            # What has been done of a prompt may have been done of one that is behind.
            queue = np.minimum(queue, np.maximum(waits.pending_s + others_s - self.behind_s, 0.0) + late_s)
        return queue

    def before(self, *, best_effort: bool) -> "Candidates":
        """With what has a place before a request of that class: others than best effort overtake it."""
        if best_effort:
            return self
        return replace(
            self,
            in_flight_requests=np.maximum(self.in_flight_requests - self.overtaken, 0.0),
            in_flight_tokens=np.maximum(self.in_flight_tokens - self.overtaken_tokens, 0.0),
        )

    def without(self, behind: Floats) -> "Candidates":
        """With what engines compute before a request alone. behind: see `Membership.behind`."""
        seconds, requests, tokens = behind
        return replace(
            self,
            in_flight_requests=np.maximum(self.in_flight_requests - requests, 0.0),
            in_flight_tokens=np.maximum(self.in_flight_tokens - tokens, 0.0),
            behind_s=seconds,
        )

    @property
    def workers(self) -> tuple[WorkerSnapshot, ...]:
        return self.fixed.workers

    def __len__(self) -> int:
        return len(self.fixed.workers)


def fixed_columns(
    workers: Sequence[WorkerSnapshot],
    registrations: Sequence[wire.WorkerRegistration],
    everybody: Sequence[wire.WorkerRegistration],
) -> Fixed:
    """What a worker has not measured is taken from those of its pool, else of the service, else from a rough figure.
    What is no number of seconds is not measured, nor is what was measured with it.

    registrations: of these workers; everybody: of all workers of the service.
    """

    costs: dict[str, Floats] = {}
    for group in _COST_GROUPS:
        own, others = _costs(registrations, group), _costs(everybody, group)
        otherwise = _column([_ROUGH_COSTS[name] for name in group])
        for known in (others, own):
            measured = (known > 0).any(axis=1)
            if measured.any():
                otherwise = known[measured].mean(axis=0)
        filled = np.where(np.any(own > 0, axis=1, keepdims=True), own, otherwise)
        costs.update(zip(group, filled.T, strict=True))
    return Fixed(
        workers=tuple(workers),
        total_tokens=_column([record.load.total_blocks * record.block_size_tokens for record in registrations]),
        free_tokens=_column([record.load.free_blocks * record.block_size_tokens for record in registrations]),
        max_running_requests=_column([record.max_running_requests for record in registrations]),
        adapters=tuple(frozenset(record.adapters) for record in registrations),
        **costs,
    )


def candidates(fixed: Fixed, loads: Floats, now_s: float, others: "Floats | None" = None) -> Candidates:
    """loads: see `Loads.of`. others: see `OtherRouters.of`."""
    if others is None:
        others = np.zeros((len(Share), loads.shape[1]))
    queue = queue_s(loads, now_s, others[Share.QUEUE_S]) + others[Share.QUEUE_S]
    loads[Load.REQUESTS] += others[Share.REQUESTS]
    loads[Load.TOKENS] += others[Share.TOKENS]
    loads[Load.UNCOMPUTED] += others[Share.UNCOMPUTED]
    loads[Load.DECODING] += others[Share.DECODING]
    loads[Load.DECODING_TOKENS] += others[Share.DECODING_TOKENS]
    loads[Load.COMING] += others[Share.COMING]
    loads[Load.COMING_TOKENS] += others[Share.COMING_TOKENS]
    loads[Load.ANSWER_TOKENS] += others[Share.ANSWER_TOKENS]
    return Candidates(
        fixed=fixed,
        in_flight_requests=loads[Load.REQUESTS],
        in_flight_tokens=loads[Load.TOKENS],
        uncomputed_tokens=loads[Load.UNCOMPUTED],
        queue_s=queue,
        turn=loads[Load.TURN],
        decoding=loads[Load.DECODING],
        decoding_tokens=loads[Load.DECODING_TOKENS],
        coming=loads[Load.COMING],
        coming_tokens=loads[Load.COMING_TOKENS],
        answer_tokens=loads[Load.ANSWER_TOKENS],
        prefills=_prefills(loads, now_s, others[Share.QUEUE_S]),
        others_s=others[Share.QUEUE_S],
        ahead=_ahead(loads, now_s),
        others_ahead_s=others[Share.AHEAD_S],
        overtaken=loads[Load.OVERTAKEN] + others[Share.OVERTAKEN],
        overtaken_tokens=loads[Load.OVERTAKEN_TOKENS] + others[Share.OVERTAKEN_TOKENS],
        arriving=loads[Load.ARRIVING] + others[Share.ARRIVING],
        arriving_s=_arriving_s(loads, now_s),
        best_effort=loads[Load.BEST_EFFORT],
    )


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)


def _costs(registrations: Sequence[wire.WorkerRegistration], group: Sequence[str]) -> Floats:
    """(registrations, group)"""
    values = [[getattr(record.costs, name) for name in group] for record in registrations]
    told = np.array(values, dtype=np.float64).reshape(len(registrations), len(group))
    are_seconds = np.all(np.isfinite(told) & (told >= 0), axis=1, keepdims=True)
    return np.where(are_seconds, told, 0.0)


def queue_s(loads: Floats, now_s: float, others_s: "Floats | float" = 0.0) -> Floats:
    """Until all prefills of this router are over, and what has come of prompts that still arrive is computed."""
    prefills = _prefills(loads, now_s, others_s)
    queue: Floats = prefills.left_s() + prefills.late_s() + _arriving_s(loads, now_s)
    return queue


def ahead_s(loads: Floats, now_s: float) -> Floats:
    """Of that, the prefills that are not best effort."""
    return _ahead(loads, now_s).left_s()


def _arriving_s(loads: Floats, now_s: float) -> Floats:
    arriving_s: Floats = np.maximum(loads[Load.ARRIVING_UNTIL_S] - now_s, 0.0)
    return arriving_s


def _prefills(loads: Floats, now_s: float, others_s: "Floats | float") -> Prefills:
    others_s = np.maximum(others_s, loads[Load.OTHERS_S])
    return Prefills(loads[Load.PENDING_S], loads[Load.LONGEST_S], now_s - loads[Load.PROGRESS_S], others_s)


def _ahead(loads: Floats, now_s: float) -> Prefills:
    return Prefills(loads[Load.AHEAD_S], loads[Load.AHEAD_LONGEST_S], now_s - loads[Load.AHEAD_PROGRESS_S])
