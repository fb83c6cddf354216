"""An engine of few lines: continuous batching as vLLM does it, over the real tiers, without vLLM's scheduler.

A step takes one token for each request that decodes, and fills up with prompts, first come first served, in chunks of
what is left of the token budget, or of what a bound on its duration leaves (`light_chunk_bound`). A request whose KV
has been pulled needs one step more; with `pulled_first` no prompt is before it. While no prompt is computed, many steps
are taken at once, up to the first that ends a request, or that a new one could join.

Simpler than vLLM's scheduler, which `vllm_engine` has: a request is admitted when there is room for its prompt
and its whole answer, so that none is preempted; its answer is not cached.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from cluster_core.engine_jobs import SessionMode
from cluster_core.engine_reports import EngineCosts
from cluster_sim.costs.step_work import CostModel, StepWork
from cluster_sim.engines.block_cache import BlockCache
from cluster_sim.engines.engine import EngineTotals, Outcome, OutcomeKind, SimInput, SimJob
from cluster_sim.engines.light_chunk_bound import SEEN_WAITING, ChunkBound
from cluster_sim.engines.light_host_link import HostLink
from cluster_sim.engines.light_leap import Leap
from cluster_sim.engines.light_request import ALL, At, LightRequest, chunks, computable, place_in
from cluster_sim.engines.shared_reads import Readers
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.tiers.settings import TierSettings
from worker_runtime.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class LightEngineSettings:
    """device_blocks, host_blocks: of KV. max_running_requests, max_batched_tokens: of one step, as vLLM's.
    pulled_first: before prompts, instead of by arrival."""

    block_tokens: int
    device_blocks: int
    host_blocks: int = 0
    max_running_requests: int = 256
    max_batched_tokens: int = 8192
    tiers: TierSettings = field(default_factory=TierSettings)
    chunk_bound: ChunkBound | None = None
    pulled_first: bool = False


class LightEngine:
    """See `cluster_sim.engines.engine.SimEngine`."""

    def __init__(self, cost_model: CostModel, settings: LightEngineSettings) -> None:
        self.totals = EngineTotals()
        self._model = cost_model
        self._settings = settings
        self._cache = BlockCache(settings.tiers, settings.device_blocks, settings.host_blocks, self._stored)
        self._measured = StepCosts()
        self._requests: dict[int, LightRequest] = {}
        self._waiting: deque[LightRequest] = deque()
        self._prefilling: list[LightRequest] = []
        self._decoding: list[LightRequest] = []
        # Of the requests that decode: the tokens that they attend to, and the blocks of their prompts.
        self._context = 0
        self._readers = Readers(settings.block_tokens)
        self._running = 0
        # Blocks that could be had when the first of the queue did not fit.
        self._too_few = -1
        self._leap: Leap | None = None
        self._host_link = HostLink(cost_model)
        self._factor = 1.0
        self._outcomes: list[Outcome] = []
        self._now_s = 0.0

    # For the cluster.

    def add(self, job: SimJob, now_s: float) -> None:
        self._enter(LightRequest(job, job.keys.tolist(), job.prompt_tokens, left=job.own_tokens), now_s)

    def open(self, job: SimJob, first: SimInput, mode: SessionMode, now_s: float) -> None:
        self._enter(LightRequest(job, job.keys.tolist(), computable(job, first), left=job.output_tokens), now_s)

    def take_input(self, number: int, following: SimInput, now_s: float) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        self._now_s = now_s
        if request.at in (At.PREFILLING, At.LOADING):
            # The last token is always computed.
            kept = min(following.kept_tokens, following.prompt_tokens - following.is_last)
            request.kept = min(request.kept, kept)
            # What a step computes now it computes to its end.
            if self._leap is None or all(each is not request for each, _ in self._leap.chunks):
                self._invalidate(request)
        request.known = computable(request.job, following)
        if request.at is At.WAITING:
            request.computed = max(0, min(request.computed, request.known - 1))
        self._stir(now_s)

    def landed(self, number: int, now_s: float) -> None:
        self._now_s = now_s
        request = self._requests.get(number)
        if request is None or request.at is not At.PULLING:
            return
        self._measured.pulled(now_s - request.since_s, request.job.prompt_tokens - request.cached)
        # Of the first token, which is known, no more than the KV is missing.
        request.computed = request.job.prompt_tokens - 1
        self._begin_prefill(request)
        self._stir(now_s)

    def release(self, number: int, now_s: float) -> None:
        request = self._requests.get(number)
        if request is not None and request.at is At.HELD:
            self._end(request)
            self._stir(now_s)

    def abort(self, number: int, now_s: float) -> None:
        self._now_s = now_s
        request = self._requests.get(number)
        if request is None:
            return
        self._cut(now_s)
        if request.at is At.WAITING:
            self._waiting.remove(request)
            self._too_few = -1
            del self._requests[number]
        elif request.at is At.LOADING:
            # The copy goes on; its request is gone.
            self._cache.tiers.let_go(request.match.host, loaded=False)
            request.match.host.clear()
            self._end(request)
        else:
            if request.at is At.PREFILLING:
                self._prefilling.remove(request)
            elif request.at is At.DECODING:
                self._leave(request)
            self._end(request)
        self._stir(now_s)

    def next_s(self) -> float:
        if self._outcomes:
            return self._now_s
        return min(self._host_link.next_s(), self._end_s())

    def advance(self, now_s: float) -> Sequence[Outcome]:
        while (next_s := min(self._host_link.next_s(), self._end_s())) <= now_s:
            self._now_s = next_s
            if self._end_s() <= next_s:
                self._finish_leap()
            while self._host_link.next_s() <= next_s:
                self._load_ended(self._host_link.loaded())
            self._stir(next_s)
        self._now_s = max(self._now_s, now_s)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def claim_changes(self) -> ClaimChange:
        return self._cache.claim_changes()

    def slow_down(self, factor: float, now_s: float) -> None:
        self._factor = factor
        self._cut(now_s)

    def load(self) -> tuple[int, int]:
        return self._cache.obtainable, self._cache.size

    def costs(self) -> EngineCosts:
        return self._measured.costs()

    def check_invariants(self) -> None:
        self._cache.check_invariants()
        assert self._running == sum(each.at not in (At.WAITING, At.HELD) for each in self._requests.values())
        assert self._context == sum(each.context for each in self._decoding), "contexts are miscounted"
        if not self._requests:
            assert not self._readers.names, "blocks of nobody are counted as read"
            assert self._cache.obtainable == self._cache.size, "blocks are lost"

    # Admission.

    def _enter(self, request: LightRequest, now_s: float) -> None:
        self._now_s = request.entered_s = now_s
        if not request.job.pulls:
            # Until it is admitted: what the bound on a step takes it for.
            match = self._cache.match(request.hashes)
            cached = (len(match.device) + len(match.host)) * self._settings.block_tokens
            request.computed = max(0, min(cached, request.known - 1))
        self._requests[request.job.number] = request
        self._waiting.insert(place_in(self._waiting, request, pulled_first=self._settings.pulled_first), request)
        self._too_few = -1 if self._waiting[0] is request else self._too_few
        self._stir(now_s)

    def _stir(self, now_s: float) -> None:
        """Something has changed: requests that can begin begin, and a step is taken if none is under way."""
        admitted = self._admit(now_s)
        if admitted or self._prefilling:
            self._cut(now_s)
        if self._leap is None:
            self._leap = self._next_leap(now_s)

    def _admit(self, now_s: float) -> bool:
        """A prompt is once those before it leave some of a step's tokens, and finds what they have computed by then."""
        admitted = False
        budget: int | None = None
        while self._waiting and self._running < self._settings.max_running_requests:
            request = self._waiting[0]
            if self._prefilling and not request.job.pulls:
                budget = self._budget(now_s) if budget is None else budget
                if sum(each.known - each.computed for each in self._prefilling) >= budget:
                    break
            obtainable = self._cache.obtainable
            if obtainable <= self._too_few or not self._take_blocks(request):
                self._too_few = max(obtainable, self._too_few)
                break
            self._too_few = -1
            self._waiting.popleft()
            admitted = True
            if request.job.number in self._requests:
                self._begin(request, now_s)
        return admitted

    def _take_blocks(self, request: LightRequest) -> bool:
        """Whether the request has its blocks, or can never have them and is gone."""
        job, block_tokens = request.job, self._settings.block_tokens
        needed = -(-(job.prompt_tokens + job.output_tokens) // block_tokens)
        if needed > self._cache.size:
            del self._requests[job.number]
            self._outcomes.append(Outcome(job, OutcomeKind.REFUSED, self._now_s))
            return True
        # The last token is always computed: without it there is no first token of the answer.
        match = self._cache.match(request.hashes[: min(job.prompt_tokens - 1, request.known) // block_tokens])
        self._cache.hold(match)
        wanted = needed - len(match.device)
        if self._cache.obtainable < wanted:
            self._cache.unhold(match)
            return False
        self._cache.tiers.accessed(request.hashes)
        request.match, request.blocks = match, self._cache.take(wanted)
        request.cached = len(match.device) * block_tokens
        return True

    def _begin(self, request: LightRequest, now_s: float) -> None:
        """It has its blocks."""
        self._running += 1
        job, match = request.job, request.match
        host_tokens = len(match.host) * self._settings.block_tokens
        if job.pulls:
            if match.host:
                self._cache.tiers.let_go(match.host, loaded=False)
                match.host.clear()
            request.at, request.since_s = At.PULLING, now_s
            self._outcomes.append(Outcome(job, OutcomeKind.PULLS, now_s, job.prompt_tokens - request.cached))
            return
        self.totals.device_hit_tokens += request.cached
        self.totals.host_hit_tokens += host_tokens
        request.cached += host_tokens
        request.computed = request.cached
        if host_tokens:
            request.at = At.LOADING
            self._host_link.load(request, host_tokens, now_s)
            return
        self._begin_prefill(request)

    def _load_ended(self, request: LightRequest) -> None:
        if self._requests.get(request.job.number) is not request:
            return
        self._measured.loaded(self._host_link.seconds, self._host_link.tokens)
        self._cache.tiers.let_go(request.match.host, loaded=True)
        request.match.host.clear()
        self._begin_prefill(request)

    def _invalidate(self, request: LightRequest) -> None:
        """What the prompt has lost is computed again, from the beginning of its block on."""
        if request.kept < request.computed:
            kept = request.kept // self._settings.block_tokens * self._settings.block_tokens
            self.totals.invalidated_tokens += request.computed - kept
            request.computed = kept
        request.kept = ALL

    def _begin_prefill(self, request: LightRequest) -> None:
        request.at = At.PREFILLING
        self._prefilling.insert(place_in(self._prefilling, request, pulled_first=self._settings.pulled_first), request)

    def _stored(self, blocks: int) -> None:
        self._host_link.store(blocks * self._settings.block_tokens, self._now_s)

    # Steps.

    def _end_s(self) -> float:
        return self._leap.end_s if self._leap is not None else math.inf

    def _next_leap(self, now_s: float) -> Leap | None:
        decoding = len(self._decoding)
        computed = chunks(self._prefilling, self._budget(now_s))
        if computed:
            return Leap(now_s, self._mixed_step_s(computed), 0.0, 1, computed, decoding)
        if not decoding:
            return None
        steps = min(request.left for request in self._decoding)
        read = self._context - self._readers.repeated_tokens
        first_s, second_s = (
            self._model.step_s(StepWork(0, 0.0, decoding, self._context + grown, read + grown)) * self._factor
            for grown in (0, decoding)
        )
        return Leap(now_s, first_s, second_s - first_s, steps, (), decoding)

    def _budget(self, now_s: float) -> int:
        """Prompt tokens that the step which begins now may compute."""
        budget = max(0, self._settings.max_batched_tokens - len(self._decoding))
        bound = self._settings.chunk_bound
        if bound is None or not self._prefilling:
            return budget
        prompts = [*self._prefilling, *(each for each in islice(self._waiting, SEEN_WAITING) if not each.job.pulls)]
        return bound.tokens(
            lambda tokens: self._mixed_step_s(chunks(prompts, tokens)), budget, prompts, self._decoding, now_s
        )

    def _mixed_step_s(self, computed: Sequence[tuple[LightRequest, int]]) -> float:
        """Of a step that computes these beside all that decodes."""
        tokens = sum(each for _, each in computed)
        pairs = sum(each * (request.computed + each / 2) for request, each in computed)
        read = self._context - self._readers.repeated_tokens
        work = StepWork(tokens, pairs, len(self._decoding), self._context, read)
        return self._model.step_s(work) * self._factor

    def _cut(self, now_s: float) -> None:
        """Steps that have not begun do not happen as planned; the one under way is finished."""
        if self._leap is not None and self._leap.steps > 1:
            self._leap = replace(self._leap, steps=self._leap.begun(now_s))

    def _finish_leap(self) -> None:
        leap, self._leap = self._leap, None
        assert leap is not None
        seconds, now_s = leap.lasting_s(leap.steps), leap.end_s
        self.totals.busy_s += seconds
        if leap.decoding:
            self.totals.decode_steps += leap.steps
        prefilled = [(each.computed, tokens) for each, tokens in leap.chunks]
        self._measured.stepped(seconds / leap.steps, prefilled, leap.decoding, self._context)
        self._decoded(leap.steps, now_s)
        for request, tokens in leap.chunks:
            if request.at is not At.PREFILLING or request.job.number not in self._requests:
                continue
            request.computed += tokens
            if not request.job.pulls:
                self.totals.prefill_tokens += tokens
            self._invalidate(request)
            if request.computed == request.job.prompt_tokens:
                self._prefilled(request, now_s)

    def _decoded(self, steps: int, now_s: float) -> None:
        finished = []
        for request in self._decoding:
            request.left -= steps
            if not request.left:
                finished.append(request)
        tokens = steps * len(self._decoding)
        self._context += tokens
        self.totals.decode_tokens += tokens
        for request in finished:
            self._leave(request)
            self._finished(request, now_s)

    def _prefilled(self, request: LightRequest, now_s: float) -> None:
        self._prefilling.remove(request)
        request.left -= 1
        request.first_s = request.entered_s if request.job.pulls else now_s
        job, hashes, held = request.job, request.hashes, request.held
        # The block of the last token may have been on the device all along.
        first = min(len(self._cache.match(hashes).device), len(hashes))
        if first < len(hashes):
            self._cache.publish(hashes, first, held[first : len(hashes)])
        self._cache.copy_out(hashes)
        self._outcomes.append(Outcome(job, OutcomeKind.FIRST_TOKEN, now_s, job.prompt_tokens - request.cached))
        if not request.left:
            self._finished(request, now_s)
            return
        request.at = At.DECODING
        self._decoding.append(request)
        self._context += request.context
        self._readers.join(job.number, request.prompt_blocks)

    def _leave(self, request: LightRequest) -> None:
        self._decoding.remove(request)
        self._context -= request.context
        self._readers.leave(request.job.number)

    def _finished(self, request: LightRequest, now_s: float) -> None:
        self._outcomes.append(Outcome(request.job, OutcomeKind.FINISHED, now_s))
        if request.job.hand_off:
            request.at = At.HELD
            self._running -= 1
        else:
            self._end(request)
        loaded = self._cache.promote() * self._settings.block_tokens
        if loaded:
            self._host_link.promote(loaded, now_s)

    def _end(self, request: LightRequest) -> None:
        """Its blocks are needed no more."""
        self._running -= request.at is not At.HELD
        del self._requests[request.job.number]
        self._cache.free(request.held)
