"""Decides where a request goes: one pool's worker, and whether the prompt is prefilled apart from its decode. Pure.

A decision reads a view and draws from the generator that it is given; nothing else changes, so that the same view and
generator decide alike for a request that is placed (`placer` commits the choice) and for one that is only supposed.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import PlacementSection
from control_plane.model.worker_snapshot import Pool, WorkerSnapshot
from control_plane.placement import disaggregation
from control_plane.placement.disaggregation import LOCAL, Prices, Reason
from control_plane.placement.policy import Decision, PlacementPolicy, Question
from control_plane.placement.terms import make_policy
from control_plane.placement.view import PoolView

BOTH_POOLS: tuple[Pool, ...] = (wire.POOL_PREFILL, wire.POOL_DECODE)
_OURS = "hotness"
_LOAD_ONLY = "least_loaded"


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One pool's decision on one request. policy: the one in force; `least_loaded` while the index is stale."""

    policy: PlacementPolicy
    question: Question
    decision: Decision

    @property
    def view(self) -> PoolView:
        return self.decision.view

    @property
    def pool(self) -> Pool:
        return self.decision.view.pool

    @property
    def worker(self) -> WorkerSnapshot | None:
        return self.decision.worker


@dataclass(frozen=True, slots=True, eq=False)
class RouteChoice:
    """Whether a request is disaggregated, and the worker that its prefill would go to."""

    reason: Reason
    prefill: Choice
    # Where the two ways were compared.
    prices: Prices | None = None

    @property
    def is_local(self) -> bool:
        """The decode pool computes the prompt."""
        return self.reason in LOCAL


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says of placement. The policies: by pool."""

    policies: Mapping[Pool, PlacementPolicy]
    # Where whoever prefills decodes as well: workers that do both, and decode workers without any that prefill.
    both: PlacementPolicy
    load_only: Mapping[Pool, PlacementPolicy]
    always_disaggregates: bool
    most_local_tokens: int

    @classmethod
    def of(cls, settings: PlacementSection) -> "Rules":
        # Placement by the objectives asks none of them.
        policy = _OURS if settings.policy in ("default", "objectives") else settings.policy
        given = {wire.POOL_PREFILL: settings.prefill_weights, wire.POOL_DECODE: settings.decode_weights}
        weights = {pool: each.model_dump() if policy == _OURS else None for pool, each in given.items()}
        return cls(
            policies={pool: make_policy(policy, pool, weights[pool]) for pool in BOTH_POOLS},
            both=make_policy(policy, wire.POOL_DECODE, weights[wire.POOL_DECODE], does_both=True),
            load_only={pool: make_policy(_LOAD_ONLY, pool) for pool in BOTH_POOLS},
            always_disaggregates=settings.disaggregation == "always",
            most_local_tokens=settings.local_prefill_tokens,
        )

    def pools_of_route(self, *, is_whole: bool) -> tuple[Pool, ...]:
        """The pools that `route` has to see. What still arrives is prefilled where that is waited for."""
        return BOTH_POOLS if is_whole and not self.always_disaggregates else (wire.POOL_PREFILL,)

    def decide(self, view: PoolView, question: Question, rng: random.Random, *, does_both: bool = False) -> Choice:
        """does_both: a worker that computes the prompt is to decode it as well."""
        policy = self.both if does_both else self.policies[view.pool]
        if view.is_stale:
            policy = self.load_only[view.pool]
        return Choice(policy, question, policy.choose(question, view, rng))

    def route(
        self, views: Mapping[Pool, PoolView], question: Question, rng: random.Random, *, is_whole: bool
    ) -> RouteChoice:
        """views: of `pools_of_route`. is_whole: nothing more comes to the prompt."""
        view = views[wire.POOL_PREFILL]
        prefill = self.decide(view, question, rng, does_both=view.does_both)
        if wire.POOL_DECODE not in self.pools_of_route(is_whole=is_whole):
            return RouteChoice(Reason.ALWAYS if is_whole else Reason.SESSION, prefill)
        if prefill.worker is None:
            return RouteChoice(Reason.PREFILL_DOWN, prefill)
        if view.does_both:
            return RouteChoice(Reason.WHOLE, prefill)
        decode = self.decide(views[wire.POOL_DECODE], question, rng)
        if decode.worker is None:
            return RouteChoice(Reason.DECODE_DOWN, prefill)
        prices = disaggregation.prices(prefill.decision, decode.decision, question)
        return RouteChoice(disaggregation.reason_for(prices, self.most_local_tokens), prefill, prices)
