"""Where a router sends its requests: each is looked at, decided on, and committed, from memory.

Nothing here waits. A decision (`decision`) sees a frozen view and changes nothing but the seeded choice between equals;
what follows from it stands in the ledger. While the index is stale, placement knows load alone.
"""

import copy
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import PlacementSection
from cluster_core.clock import monotonic_s
from cluster_core.objectives import is_best_effort
from control_plane.fleet.loads import Work
from control_plane.fleet.membership import Membership
from control_plane.model.job import Job
from control_plane.model.limits import max_tokens_of
from control_plane.model.memory_use import MemoryUse
from control_plane.model.prefix_scope import PrefixScope
from control_plane.model.worker_snapshot import Pool
from control_plane.placement.counts import PlacementCounts
from control_plane.placement.decision import BOTH_POOLS, Rules
from control_plane.placement.decision_log import DecisionLog, Explanation
from control_plane.placement.disaggregation import Reason
from control_plane.placement.flight import Flight, Placement
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.ledger import Ledger
from control_plane.placement.policy import Question
from control_plane.placement.replication import Copy, Demand
from control_plane.placement.roles import ToldRoles
from control_plane.placement.session_work import SessionWork
from control_plane.placement.view import PoolView
from control_plane.placement.view_builder import ViewBuilder
from control_plane.prefix_index.index import Matches
from kv_transfer.claims.prefix_chunks import Keys, PackedPrompt, chunk_keys, root_key

__all__ = ["Flight", "Placement", "Placer"]

# Prefixes that are looked at for copies, and requests of one that its cost is the mean of.
_MOST_DEMANDS = 32
_MEAN_OF = 16


class Placer:
    """See the module. rng: decides between equals. now_s: now, on the clock of load."""

    def __init__(
        self,
        membership: Membership,
        index: IndexPorts,
        settings: PlacementSection,
        *,
        service_id: str,
        chunk_tokens: int,
        rng: random.Random,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._membership = membership
        self._index = index
        self._settings = settings
        self._service_id = service_id
        self.chunk_tokens = chunk_tokens
        self._rng = rng
        self._now_s = now_s
        self._rules = Rules.of(settings)
        self._ledger = Ledger(membership, index.index, settings, now_s)
        self._sessions = SessionWork()
        self._views = ViewBuilder(membership, index, self._ledger.running, chunk_tokens=chunk_tokens)

    # Requests.

    def packed(self, token_ids: Sequence[int] | NDArray[np.uint32], scope: PrefixScope) -> PackedPrompt:
        """A prompt with the names of its chunks."""
        tokens = np.asarray(token_ids, dtype=np.uint32)
        root = root_key(self._service_id, scope.cache_salt, scope.adapter_digest)
        return PackedPrompt(tokens, chunk_keys(tokens, root, self.chunk_tokens))

    def keep(self, job: Job) -> None:
        """The request's prompt is whole, and counts as an access to its prefixes."""
        if job.prompt_changes:
            job.prompt_changes, job.packed = False, None
            self._sessions = self._sessions.became_whole(len(job.token_ids), job.cached_tokens)
        keys = self._prompt(job).keys
        if len(keys):
            self._index.record_access(keys)

    def answered(self, job: Job, tokens: int) -> None:
        """The answer has ended with so many, one or more: it is whole, or its client has left."""

    def route(self, job: Job, *, is_whole: bool) -> Placement | None:
        """The first decision on a request: where it is prefilled, or None where the decode pool computes the prompt.

        None, too, where no prefill worker may get it. is_whole: nothing more comes to the prompt.
        """
        prompt, question = self._prompt(job), question_of(job)
        views = self._current_views(prompt.keys, self._rules.pools_of_route(is_whole=is_whole))
        return self._ledger.routed(job, prompt, self._rules.route(views, question, self._rng, is_whole=is_whole))

    def place(
        self,
        job: Job,
        pool: Pool,
        excluded: frozenset[tuple[str, int]] = frozenset(),
        *,
        avoided: frozenset[tuple[str, int]] = frozenset(),
        prefills: bool = False,
    ) -> Placement | None:
        """None when no worker of the pool may get the request. prefills: a decode worker is to compute the prompt."""
        prompt, question = self._prompt(job), question_of(job, excluded, avoided)
        view = self._current_views(prompt.keys, [pool])[pool]
        computes = prefills or pool == wire.POOL_PREFILL
        choice = self._rules.decide(view, question, self._rng, does_both=computes and self._does_both(view))
        return self._ledger.placed(job, prompt, choice, prefills=prefills)

    def begin(self, placement: Placement) -> Flight:
        """The request is sent to its worker. The flight has to be ended."""
        return self._ledger.begin(placement)

    def told_roles(self) -> ToldRoles:
        """What other routers are told of roles, which are looked at where that is due."""
        return ToldRoles()

    # Questions. They change nothing, the seeded choice included.

    @property
    def counts(self) -> PlacementCounts:
        """What was decided so far."""
        return self._ledger.counts

    @property
    def log(self) -> DecisionLog:
        return self._ledger.log

    def memory(self) -> tuple[MemoryUse, ...]:
        """What is remembered of requests that have been placed."""
        return self._ledger.recent.memory(), self._ledger.log.memory(), self._index.index.memory()

    def prefill_heavy(self) -> int:
        """How many of the workers that do both decode little."""
        return 0

    def supposed(
        self, prompt: PackedPrompt, max_tokens: int, adapter: str = "", tenant: str = "", weight: float = 1.0
    ) -> Explanation:
        """What would be decided now for a request with this whole prompt: whether it would be disaggregated, and which
        worker each pool would choose. adapter: its digest. weight: of the tenant."""
        question, rng = Question(len(prompt.token_ids), max_tokens, adapter=adapter), copy.copy(self._rng)
        views = self._views_of(prompt.keys, BOTH_POOLS, self._now_s())
        route = self._rules.route(views, question, rng, is_whole=True)
        view = views[wire.POOL_DECODE]
        is_whole = route.reason is Reason.WHOLE
        does_both = self._does_both(view) and (is_whole or not view.does_both)
        decode = self._rules.decide(view, question, rng, does_both=does_both)
        explanation = Explanation("", reason=route.reason, prices=route.prices)
        explanation.choices += [decode] if is_whole else [route.prefill, decode]
        return explanation

    def matches(self, keys: Keys) -> Matches:
        """What the index says of a prompt, given by its chunks' keys; what predictions that have ended said is gone."""
        return self._index.index.lookup(keys, self._now_s())

    # Copies of hot prefixes.

    def demands(self) -> list[Demand]:
        """What the hottest prefixes ask of the prefill workers that hold them."""
        found = []
        for prefix in self._index.index.hottest(_MOST_DEMANDS, self._index.now_s()):
            prompts = self._ledger.recent.with_prefix(prefix.key, prefix.chunks)[:_MEAN_OF]
            if prompts:
                found.append(Demand(prefix, sum(each.expected_s for each in prompts) / len(prompts)))
        return found

    def prefill_queues(self) -> dict[str, float]:
        """Seconds that each usable prefill worker has before it."""
        candidates = self._membership.candidates(wire.POOL_PREFILL, self._now_s())
        return {each.worker_id: float(s) for each, s in zip(candidates.workers, candidates.queue_s, strict=True)}

    def copy_placement(self, wanted: Copy) -> Placement | None:
        """A prefix for a worker that shall hold it too; None where its tokens or the worker are not known any more."""
        prompts = self._ledger.recent.with_prefix(wanted.key, wanted.chunks)
        candidates = self._membership.candidates(wire.POOL_PREFILL, self._now_s())
        rows = [row for row, each in enumerate(candidates.workers) if each.worker_id == wanted.worker_id]
        if not prompts or not rows:
            return None
        tokens = prompts[0].token_ids[: wanted.chunks * self.chunk_tokens]
        prompt = PackedPrompt(tokens, prompts[0].keys[: wanted.chunks])
        expected_s = len(tokens) * float(candidates.fixed.prefill_s_per_token[rows[0]])
        work = Work(len(tokens), len(tokens), expected_s)
        return Placement(candidates.workers[rows[0]], work, prompt, prompts[0].scope)

    def _current_views(self, keys: Keys, pools: Sequence[Pool]) -> dict[Pool, PoolView]:
        """For a decision that will be committed."""
        now_s = self._now_s()
        self._ledger.expire(now_s)
        return self._views_of(keys, pools, now_s)

    def _views_of(self, keys: Keys, pools: Sequence[Pool], now_s: float) -> dict[Pool, PoolView]:
        long_s = self._ledger.long_prompts.long_s if self._settings.long_prompts_apart else math.inf
        return {pool: self._views.view(pool, keys, now_s, long_s=long_s, session=self._sessions) for pool in pools}

    def _does_both(self, view: PoolView) -> bool:
        """Whoever of these workers computes a prompt decodes it: that is their kind, or nobody else prefills."""
        return view.does_both or not self._membership.usable(wire.POOL_PREFILL)

    def _prompt(self, job: Job) -> PackedPrompt:
        """As it stands, with what is emitted of an answer that goes on."""
        emitted = job.emitted_to_prefill
        if job.packed is None or job.prompt_changes or job.packed_emitted != emitted:
            job.packed_emitted = emitted
            job.packed = self.packed([*job.token_ids, *job.emitted] if emitted else job.token_ids, job.scope)
        return job.packed


def question_of(
    job: Job, excluded: frozenset[tuple[str, int]] = frozenset(), avoided: frozenset[tuple[str, int]] = frozenset()
) -> Question:
    return Question(
        len(job.token_ids) + job.emitted_to_prefill,
        max(max_tokens_of(job.sampling) - job.emitted_to_prefill, 1),
        excluded,
        alone=job.deaths > 0,
        avoided=avoided,
        adapter=job.scope.adapter_digest,
        best_effort=is_best_effort(job.priority),
        arriving=job.prompt_changes,
    )
