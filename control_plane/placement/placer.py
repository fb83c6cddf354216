"""Where a router sends its requests: membership, index and policy brought together, and what was decided, for people.

Nothing here waits: a decision is made from memory. While the index is stale, placement knows load alone.
"""

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import PlacementSection
from cluster_core.clock import monotonic_s, unix_ms
from control_plane.fleet.candidates import Candidates
from control_plane.fleet.loads import Work
from control_plane.fleet.membership import Member, Membership
from control_plane.model.job import Job
from control_plane.model.limits import max_tokens_of
from control_plane.model.worker_snapshot import Pool, WorkerSnapshot
from control_plane.placement import disaggregation
from control_plane.placement.counts import PlacementCounts
from control_plane.placement.disaggregation import Prices, Reason
from control_plane.placement.long_prompts import LongPrompts
from control_plane.placement.policy import Decision, PlacementPolicy, Question
from control_plane.placement.recent_prompts import RecentPrompt, RecentPrompts
from control_plane.placement.replication import Copy, Demand
from control_plane.placement.running_prefixes import RunningPrefixes
from control_plane.placement.terms import make_policy, prefill_s
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.prefix_chunks import Keys, PackedPrompt, chunk_keys, root_key

# Requests whose decisions are kept, for `rachis placement explain`.
_MOST_EXPLAINED = 1000
_MOST_CHOICES = 8
_OURS = "hotness"
_LOAD_ONLY = "least_loaded"
# Prefixes that are looked at for copies, and requests of one that its cost is the mean of.
_MOST_DEMANDS = 32
_MEAN_OF = 16
_POOLS = (wire.POOL_PREFILL, wire.POOL_DECODE)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A worker for one attempt of a request. work: what it will be to that worker."""

    worker: WorkerSnapshot
    work: Work
    prompt: PackedPrompt
    cache_salt: str


class Flight:
    """A request on a worker, from the call to its end."""

    def __init__(
        self, membership: Membership, member: Member | None, work: Work, now_s: Callable[[], float] = monotonic_s
    ) -> None:
        self._membership = membership
        self._member = member
        self._work = work
        self._now_s = now_s

    def prefilled(self) -> None:
        """The worker has computed the prompt; whoever comes now does not wait for it."""
        if self._work.expected_s:
            self._membership.prefilled(self._member, self._work, self._now_s())
            self._work = Work(self._work.tokens)

    on_end: Any = None

    def end(self) -> None:
        counted, self.on_end = self.on_end, None
        if counted is not None:
            counted.__exit__(None, None, None)

    def really_end(self) -> None:
        self._membership.release(self._member, self._work, self._now_s())


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One decision as it was made. policy: by name; `least_loaded` while the index is stale."""

    pool: Pool
    policy: PlacementPolicy
    prompt: PackedPrompt
    question: Question
    decision: Decision


@dataclass(slots=True)
class Explanation:
    """What was decided for one request, in order; of many attempts the last ones."""

    request_id: str
    choices: deque[Choice] = field(default_factory=lambda: deque(maxlen=_MOST_CHOICES))
    reason: Reason | None = None
    prices: Prices | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Where these workers stand in the index. changes: `PrefixIndex.holder_changes` at that time."""

    workers: Sequence[WorkerSnapshot]
    changes: int
    slots: NDArray[np.int64]


class Placer:
    """See the module.

    is_stale: whether the index is too old to be believed. index_time_s: now, on the clock of hotness. now_s: now, on
    the clock of load.
    asked_for(keys): told of each request's prompt, once.
    counts: what was decided so far.
    """

    def __init__(
        self,
        membership: Membership,
        index: PrefixIndex,
        settings: PlacementSection,
        *,
        service_id: str,
        chunk_tokens: int,
        is_stale: Callable[[], bool] = lambda: False,
        index_time_s: Callable[[], float] = lambda: unix_ms() / 1000,
        asked_for: Callable[[Keys], None] = lambda keys: None,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._membership = membership
        self._index = index
        self._settings = settings
        self._service_id = service_id
        self.chunk_tokens = chunk_tokens
        self._is_stale = is_stale
        self._asked_for = asked_for
        self._now_of_index = index_time_s
        self._now_s = now_s
        weights = {wire.POOL_PREFILL: settings.prefill_weights, wire.POOL_DECODE: settings.decode_weights}
        self._policies = {
            pool: make_policy(settings.policy, pool, weights[pool].model_dump() if settings.policy == _OURS else None)
            for pool in _POOLS
        }
        self._load_only = {pool: make_policy(_LOAD_ONLY, pool) for pool in _POOLS}
        self._choice = random.Random(settings.seed)
        self._running = RunningPrefixes()
        self._recent = RecentPrompts()
        self._long_prompts = LongPrompts()
        self._explanations: OrderedDict[str, Explanation] = OrderedDict()
        # The prefill worker that was found when the request was weighed, until anything else is decided.
        self._weighed: tuple[Job, Choice] | None = None
        self._slots: dict[Pool, _Slots] = {}
        self.counts = PlacementCounts()

    def packed(self, token_ids: Sequence[int] | NDArray[np.uint32], cache_salt: str) -> PackedPrompt:
        """A tenant's prompt with the names of its chunks."""
        tokens = np.asarray(token_ids, dtype=np.uint32)
        return PackedPrompt(tokens, chunk_keys(tokens, root_key(self._service_id, cache_salt), self.chunk_tokens))

    def keep(self, job: Job) -> None:
        """The request's prompt is whole, and counts as asked for."""
        if job.prompt_changes:
            job.prompt_changes, job.packed = False, None
        keys = self._prompt(job).keys
        if len(keys):
            self._asked_for(keys)

    def place(
        self, job: Job, pool: Pool, excluded: frozenset[tuple[str, int]] = frozenset(), *, prefills: bool = False
    ) -> Placement | None:
        """None when no worker of the pool may get the request. prefills: a decode worker is to compute the prompt."""
        weighed, self._weighed = self._weighed, None
        if weighed is not None and weighed[0] is job and pool == wire.POOL_PREFILL and not excluded:
            choice = weighed[1]
        else:
            choice = self._decided(job, pool, excluded)
        load_only = choice.policy is self._load_only[pool]
        self.counts.placed(pool, choice.policy.name, choice.question, choice.decision, load_only=load_only)
        self._explanation(job).choices.append(choice)
        return self._placement(job, choice, prefills=prefills)

    def weigh(self, job: Job, *, is_whole: bool) -> Reason:
        """Whether a decode worker had better prefill the request by itself, as things are.

        is_whole: nothing more comes to the prompt; what still arrives is prefilled where that is waited for.
        `place` is to follow at once: it takes the prefill worker that was found here.
        """
        self._weighed = None
        # A client may give one name to many requests: the last one is explained.
        self._explanations.pop(job.request_id, None)
        explanation = self._explanation(job)
        explanation.reason = Reason.ALWAYS if is_whole else Reason.SESSION
        if is_whole and self._settings.disaggregation != "always":
            prefill, decode = (self._decided(job, pool, frozenset()) for pool in _POOLS)
            self._weighed = (job, prefill)
            if prefill.decision.winner < 0:
                explanation.reason = Reason.PREFILL_DOWN
            elif decode.decision.winner < 0:
                explanation.reason = Reason.DECODE_DOWN
            else:
                explanation.prices = disaggregation.prices(
                    prefill.decision, prefill.question, decode.decision, decode.question
                )
                explanation.reason = disaggregation.decide(explanation.prices, self._settings.local_prefill_tokens)
        self.counts.reasons[explanation.reason] += 1
        return explanation.reason

    def route(self, job: Job, *, is_whole: bool) -> Placement | None:
        if self.weigh(job, is_whole=is_whole) in disaggregation.LOCAL:
            return None
        return self.place(job, wire.POOL_PREFILL)

    def begin(self, placement: Placement) -> "Flight":
        counted = self.in_flight(placement)
        flight = counted.__enter__()
        flight.on_end = counted
        return flight

    def explanation(self, request_id: str) -> Explanation | None:
        """What was decided for a request of late."""
        return self._explanations.get(request_id)

    @property
    def explained(self) -> list[str]:
        """Requests of late, the last one last."""
        return list(self._explanations)

    def demands(self) -> list[Demand]:
        """What the hottest prefixes ask of the prefill workers that hold them."""
        found = []
        for prefix in self._index.hottest(_MOST_DEMANDS, self._now_of_index()):
            prompts = self._recent.with_prefix(prefix.key, prefix.chunks)[:_MEAN_OF]
            if prompts:
                found.append(Demand(prefix, sum(each.expected_s for each in prompts) / len(prompts)))
        return found

    def prefill_queues(self) -> dict[str, float]:
        """Seconds that each usable prefill worker has before it."""
        candidates = self._membership.candidates(wire.POOL_PREFILL, self._now_s())
        return {each.worker_id: float(s) for each, s in zip(candidates.workers, candidates.queue_s, strict=True)}

    def copy_placement(self, copy: Copy) -> Placement | None:
        """A prefix for a worker that shall hold it too; None where its tokens or the worker are not known any more."""
        prompts = self._recent.with_prefix(copy.key, copy.chunks)
        candidates = self._membership.candidates(wire.POOL_PREFILL, self._now_s())
        rows = [row for row, each in enumerate(candidates.workers) if each.worker_id == copy.worker_id]
        if not prompts or not rows:
            return None
        tokens = prompts[0].token_ids[: copy.chunks * self.chunk_tokens]
        prompt = PackedPrompt(tokens, prompts[0].keys[: copy.chunks])
        expected_s = len(tokens) * float(candidates.fixed.prefill_s_per_token[rows[0]])
        work = Work(len(tokens), len(tokens), expected_s)
        return Placement(candidates.workers[rows[0]], work, prompt, prompts[0].cache_salt)

    @contextmanager
    def in_flight(self, placement: Placement) -> Iterator["Flight"]:
        """The request is on the worker: counted there, and its prefix is predicted to be there from now on."""
        self._weighed = None
        now_s = self._now_s()
        worker_id, keys = placement.worker.worker_id, placement.prompt.keys
        flight = Flight(
            self._membership,
            self._membership.acquire(placement.worker, placement.work, now_s),
            placement.work,
            self._now_s,
        )
        try:
            self._index.predict(worker_id, keys, now_s + self._settings.prediction_s)
            self._running.add(worker_id, keys)
            try:
                yield flight
            finally:
                self._running.remove(worker_id, keys)
        finally:
            flight.really_end()

    def _decided(self, job: Job, pool: Pool, excluded: frozenset[tuple[str, int]]) -> Choice:
        now_s = self._now_s()
        self._index.expire(now_s)
        candidates = self._membership.candidates(pool, now_s)
        stale = self._is_stale()
        prompt = self._prompt(job)
        question = self._question(job, pool, prompt.keys, candidates, excluded, knows_prefixes=not stale)
        policy = (self._load_only if stale else self._policies)[pool]
        return Choice(pool, policy, prompt, question, policy.choose(question, candidates, self._choice))

    def _question(
        self,
        job: Job,
        pool: Pool,
        keys: Keys,
        candidates: Candidates,
        excluded: frozenset[tuple[str, int]],
        *,
        knows_prefixes: bool,
    ) -> Question:
        rows = len(candidates)
        device, host, shared, sharers = np.zeros((4, rows))
        if knows_prefixes and rows and len(keys):
            matches = self._index.lookup(keys)
            slots = self._slots_of(pool, candidates.workers)
            known = slots >= 0
            device[known] = matches.warm[slots[known]] * self.chunk_tokens
            host[known] = matches.held[slots[known]] * self.chunk_tokens - device[known]
            running = self._running.shared(keys)
            if running:
                for row, worker in enumerate(candidates.workers):
                    found = running.get(worker.worker_id)
                    if found is not None:
                        shared[row], sharers[row] = found.chunks * self.chunk_tokens, found.requests
        return Question(
            len(job.token_ids),
            max_tokens_of(job.sampling),
            device,
            host,
            shared,
            sharers,
            excluded,
            self._long_prompts.long_s if self._settings.long_prompts_apart else math.inf,
        )

    def _slots_of(self, pool: Pool, workers: Sequence[WorkerSnapshot]) -> NDArray[np.int64]:
        """Their places in the index. Claims of another generation say nothing of this one."""
        known = self._slots.get(pool)
        if known is None or known.workers is not workers or known.changes != self._index.holder_changes:
            slots = np.array([self._index.slot(each.worker_id, each.generation) for each in workers], dtype=np.int64)
            known = self._slots[pool] = _Slots(workers, self._index.holder_changes, slots)
        return known.slots

    def _placement(self, job: Job, choice: Choice, *, prefills: bool) -> Placement | None:
        worker, row, question = choice.decision.worker, choice.decision.winner, choice.question
        if worker is None:
            return None
        candidates = choice.decision.candidates
        uncomputed, expected_s = round(float(question.uncached[row])), float(prefill_s(question, candidates)[row])
        prompt = choice.prompt
        if choice.pool == wire.POOL_PREFILL:
            work = Work(len(job.token_ids), uncomputed, expected_s, arriving=job.prompt_changes)
            self._long_prompts.add(expected_s)
            self._recent.add(RecentPrompt(prompt.token_ids, prompt.keys, job.cache_salt, expected_s))
        else:
            work = Work(job.tokens, uncomputed, expected_s) if prefills else Work(job.tokens)
        return Placement(worker, work, prompt, job.cache_salt)

    def _prompt(self, job: Job) -> PackedPrompt:
        """As it stands."""
        if job.packed is None or job.prompt_changes:
            job.packed = self.packed(job.token_ids, job.cache_salt)
        return job.packed

    def _explanation(self, job: Job) -> Explanation:
        known = self._explanations.get(job.request_id)
        if known is None:
            known = self._explanations[job.request_id] = Explanation(job.request_id)
            while len(self._explanations) > _MOST_EXPLAINED:
                self._explanations.popitem(last=False)
        return known
