"""Commits what was decided: counts, explanations, what prompts were sent where, and what is in flight.

A choice changes nothing until it comes here, once. What a later decision sees of it:
    long prompts        the threshold, from the prefills that were placed
    in flight           loads of the worker, and prefixes that run there, from `begin` to the flight's end
    predictions         in the index, from `begin` until they end by themselves; `expire` withdraws them
Counts, explanations and recent prompts are for people and for copies of hot prefixes.
"""

from collections.abc import Callable
from dataclasses import replace

from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import PlacementSection
from control_plane.fleet.loads import Work
from control_plane.fleet.membership import Membership
from control_plane.model.job import Job
from control_plane.placement.counts import PlacementCounts
from control_plane.placement.decision import Choice, RouteChoice
from control_plane.placement.decision_log import DecisionLog
from control_plane.placement.flight import Flight, Placement
from control_plane.placement.long_prompts import LongPrompts
from control_plane.placement.recent_prompts import RecentPrompt, RecentPrompts
from control_plane.placement.running_prefixes import RunningPrefixes
from control_plane.placement.terms import prefill_s
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.prefix_chunks import PackedPrompt


class Ledger:
    """One router's."""

    def __init__(
        self, membership: Membership, index: PrefixIndex, settings: PlacementSection, now_s: Callable[[], float]
    ) -> None:
        self._membership = membership
        self._index = index
        # How long a prefix counts as held by the worker it was sent to.
        self._prediction_s = settings.prediction_s
        self._now_s = now_s
        self.counts = PlacementCounts()
        self.log = DecisionLog(settings.explanations_mib << 20)
        self.long_prompts = LongPrompts()
        self.recent = RecentPrompts(settings.recent_prompts_mib << 20)
        self.running = RunningPrefixes()

    def expire(self, now_s: float) -> None:
        """Withdraws predictions that have ended. No decision depends on it: a view does not believe them anyway."""
        self._index.expire(now_s)

    def routed(self, job: Job, prompt: PackedPrompt, route: RouteChoice) -> Placement | None:
        """None where the decode pool computes the prompt, or no prefill worker may get it."""
        self.counts.routed(route)
        self.log.routed(job.request_id, job.tenant, route)
        return None if route.is_local else self.placed(job, prompt, route.prefill, prefills=True)

    def placed(self, job: Job, prompt: PackedPrompt, choice: Choice, *, prefills: bool) -> Placement | None:
        """None without a winner. prefills: the worker is to compute the prompt, as those of the prefill pool do."""
        self.counts.placed(choice)
        self.log.placed(job.request_id, job.tenant, choice)
        worker, row, question = choice.worker, choice.decision.winner, choice.question
        if worker is None:
            return None
        uncomputed = round(float(choice.view.uncached(question.prompt_tokens)[row]))
        expected_s = float(prefill_s(question, choice.view)[row])
        if choice.pool == wire.POOL_PREFILL:
            work = Work(question.prompt_tokens, uncomputed, expected_s, arriving=job.prompt_changes, decodes=False)
            work = replace(work, best_effort=question.best_effort)
            self.long_prompts.add(expected_s)
            self.recent.add(RecentPrompt(prompt.token_ids, prompt.keys, job.scope, expected_s))
        else:
            work = Work(job.tokens, answer_tokens=job.max_tokens)
            if prefills:
                best_effort = question.best_effort
                work = replace(work, uncomputed_tokens=uncomputed, expected_s=expected_s, best_effort=best_effort)
        return Placement(worker, work, prompt, job.scope)

    def begin(self, placement: Placement) -> Flight:
        """The request is sent to the worker: counted there, and its prefix is predicted to be there from now on."""
        now_s = self._now_s()
        worker_id, keys = placement.worker.worker_id, placement.prompt.keys
        self._index.predict(worker_id, keys, now_s + self._prediction_s)
        # What may raise comes before what a flight has to give back.
        self.running.add(worker_id, keys)
        member = self._membership.acquire(placement.worker, placement.work, now_s)
        return Flight(placement, self._membership, member, self.running, self._now_s)
