"""An engine of few lines: continuous batching as vLLM does it, over the real tiers, without vLLM's scheduler.

A step takes one token for each request that decodes, and fills up with prompts, first come first served, in chunks of
what is left of the token budget. While nobody prefills, many steps are taken at once, up to the first that ends
a request, or that somebody new could join.

Simpler than vLLM's scheduler, which `cluster_sim.vllm_engine` has: a request is admitted when there is room for its
prompt and its whole answer, so nobody is preempted; its answer is not cached.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from cluster_core.engine_jobs import SessionMode
from cluster_core.engine_reports import EngineCosts
from cluster_sim.block_cache import BlockCache
from cluster_sim.costs import CostModel, StepWork
from cluster_sim.engine import EngineTotals, Outcome, OutcomeKind, SimInput, SimJob
from kv_transfer.blocks import BlockHash
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.tiers.prefix_runs import Match
from kv_transfer.tiers.settings import TierSettings
from worker_runtime.step_costs import StepCosts

_NEVER = math.inf
_ALL = 1 << 62
# What sums of seconds may be off.
_SAME_S = 1e-9


@dataclass(frozen=True, slots=True)
class LightEngineSettings:
    """device_blocks, host_blocks: of KV. max_running_requests, max_batched_tokens: of one step, as vLLM's."""

    block_tokens: int
    device_blocks: int
    host_blocks: int = 0
    max_running_requests: int = 256
    max_batched_tokens: int = 8192
    tiers: TierSettings = field(default_factory=TierSettings)


class _At(Enum):
    """Where a request stands."""

    WAITING = auto()
    PULLING = auto()
    LOADING = auto()
    PREFILLING = auto()
    DECODING = auto()
    HELD = auto()


@dataclass(slots=True, eq=False)
class _Request:
    """known: of its prompt, what may be computed now; not all of it while a session is open. kept: of what has been
    computed, how much still stands. match, blocks: its cached
    blocks and its own, from admission on. computed: prompt tokens that are there. left: tokens still to generate.
    since_s: when the pull was asked for."""

    job: SimJob
    hashes: list[BlockHash]
    known: int
    kept: int = _ALL
    at: _At = _At.WAITING
    match: Match = field(default_factory=lambda: Match([], []))
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    computed: int = 0
    left: int = 0
    since_s: float = 0.0

    @property
    def context(self) -> int:
        return self.job.prompt_tokens + self.job.output_tokens - self.left

    @property
    def held(self) -> list[int]:
        return [*self.match.device, *self.blocks]


@dataclass(frozen=True, slots=True)
class _Leap:
    """Steps under way: so many, the first so long, each longer than the one before by `growth_s`. chunks: prompt tokens
    of each request in it; then it is one step."""

    start_s: float
    first_s: float
    growth_s: float
    steps: int
    chunks: tuple[tuple[_Request, int], ...]
    decoding: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.lasting_s(self.steps)

    def lasting_s(self, steps: int) -> float:
        """Of the first so many."""
        return steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def begun(self, now_s: float) -> int:
        """Steps that have begun by then; one at least."""
        since_s, fewest, most = now_s - self.start_s - _SAME_S, 1, self.steps
        while fewest < most:
            middle = (fewest + most) // 2
            fewest, most = (fewest, middle) if self.lasting_s(middle) >= since_s else (middle + 1, most)
        return fewest


class LightEngine:
    """See `cluster_sim.engine.SimEngine`."""

    def __init__(self, cost_model: CostModel, settings: LightEngineSettings) -> None:
        self.totals = EngineTotals()
        self._model = cost_model
        self._settings = settings
        self._cache = BlockCache(settings.tiers, settings.device_blocks, settings.host_blocks, self._stored)
        self._measured = StepCosts()
        self._requests: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._prefilling: list[_Request] = []
        self._decoding: list[_Request] = []
        # Of those who decode: what they attend to, in tokens, and how many refer to each of their cached blocks.
        self._context = 0
        self._shared_tokens = 0
        self._references: dict[int, int] = {}
        self._running = 0
        # Blocks that could be had when the first of the queue did not fit.
        self._too_few = -1
        self._leap: _Leap | None = None
        # Loads from host memory come one after the other; by the time they end.
        self._loading: deque[tuple[float, _Request]] = deque()
        self._copies_until_s = 0.0
        self._loaded_s, self._loaded_tokens = 0.0, 0
        self._factor = 1.0
        self._outcomes: list[Outcome] = []
        self._now_s = 0.0

    # What the cluster asks.

    def add(self, job: SimJob, now_s: float) -> None:
        self._enter(_Request(job, job.keys.tolist(), job.prompt_tokens, left=job.output_tokens), now_s)

    def open(self, job: SimJob, first: SimInput, mode: SessionMode, now_s: float) -> None:
        self._enter(_Request(job, job.keys.tolist(), _computable(job, first), left=job.output_tokens), now_s)

    def take_input(self, number: int, following: SimInput, now_s: float) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        self._now_s = now_s
        if request.at in (_At.PREFILLING, _At.LOADING):
            # The last token is always computed.
            kept = min(following.kept_tokens, following.prompt_tokens - following.is_last)
            request.kept = min(request.kept, kept)
            # What a step computes now it computes to its end.
            if self._leap is None or all(each is not request for each, _ in self._leap.chunks):
                self._invalidate(request)
        request.known = _computable(request.job, following)
        self._stir(now_s)

    def landed(self, number: int, now_s: float) -> None:
        self._now_s = now_s
        request = self._requests.get(number)
        if request is None or request.at is not _At.PULLING:
            return
        self._measured.pulled(now_s - request.since_s, request.job.prompt_tokens - request.cached)
        # The first token is known, and takes a step of its own.
        request.computed = request.job.prompt_tokens - 1
        self._begin_prefill(request)
        self._stir(now_s)

    def release(self, number: int, now_s: float) -> None:
        request = self._requests.get(number)
        if request is not None and request.at is _At.HELD:
            self._end(request)
            self._stir(now_s)

    def abort(self, number: int, now_s: float) -> None:
        self._now_s = now_s
        request = self._requests.get(number)
        if request is None:
            return
        self._cut(now_s)
        if request.at is _At.WAITING:
            self._waiting.remove(request)
            self._too_few = -1
            del self._requests[number]
        elif request.at is _At.LOADING:
            # The copy goes on; its request is gone.
            self._cache.tiers.let_go(request.match.host, loaded=False)
            request.match.host.clear()
            self._end(request)
        else:
            if request.at is _At.PREFILLING:
                self._prefilling.remove(request)
            elif request.at is _At.DECODING:
                self._leave(request)
            self._end(request)
        self._stir(now_s)

    def next_s(self) -> float:
        if self._outcomes:
            return self._now_s
        loaded_s = self._loading[0][0] if self._loading else _NEVER
        return min(loaded_s, self._leap.end_s if self._leap is not None else _NEVER)

    def advance(self, now_s: float) -> Sequence[Outcome]:
        while (next_s := min(self._loading[0][0] if self._loading else _NEVER, self._end_s())) <= now_s:
            self._now_s = next_s
            if self._end_s() <= next_s:
                self._finish_leap()
            while self._loading and self._loading[0][0] <= next_s:
                self._load_ended(self._loading.popleft()[1])
            self._stir(next_s)
        self._now_s = max(self._now_s, now_s)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def told(self) -> ClaimChange:
        return self._cache.told()

    def slow_down(self, factor: float, now_s: float) -> None:
        self._factor = factor
        self._cut(now_s)

    def load(self) -> tuple[int, int]:
        return self._cache.obtainable, self._cache.size

    def costs(self) -> EngineCosts:
        return self._measured.costs()

    def check_invariants(self) -> None:
        self._cache.check_invariants()
        assert self._running == sum(each.at not in (_At.WAITING, _At.HELD) for each in self._requests.values())
        assert self._context == sum(each.context for each in self._decoding), "contexts are miscounted"
        if not self._requests:
            assert not self._references, "blocks of nobody are counted as read"
            assert self._cache.obtainable == self._cache.size, "blocks are lost"

    # Admission.

    def _enter(self, request: _Request, now_s: float) -> None:
        self._now_s = now_s
        self._requests[request.job.number] = request
        self._waiting.append(request)
        self._stir(now_s)

    def _stir(self, now_s: float) -> None:
        """Something has changed: who can begin begins, and a step is taken if none is under way."""
        admitted = self._admit(now_s)
        if admitted or self._prefilling:
            self._cut(now_s)
        if self._leap is None:
            self._leap = self._next_leap(now_s)

    def _admit(self, now_s: float) -> bool:
        admitted = False
        while self._waiting and self._running < self._settings.max_running_requests:
            request = self._waiting[0]
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

    def _take_blocks(self, request: _Request) -> bool:
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

    def _begin(self, request: _Request, now_s: float) -> None:
        """It has its blocks."""
        self._running += 1
        job, match = request.job, request.match
        host_tokens = len(match.host) * self._settings.block_tokens
        if job.pulls:
            if match.host:
                self._cache.tiers.let_go(match.host, loaded=False)
                match.host.clear()
            request.at, request.since_s = _At.PULLING, now_s
            self._outcomes.append(Outcome(job, OutcomeKind.PULLS, now_s, job.prompt_tokens - request.cached))
            return
        self.totals.device_hit_tokens += request.cached
        self.totals.host_hit_tokens += host_tokens
        request.cached += host_tokens
        request.computed = request.cached
        if host_tokens:
            seconds = self._model.load_s(host_tokens)
            self._copies_until_s = max(self._copies_until_s, now_s) + seconds
            self._loaded_s, self._loaded_tokens = self._loaded_s + seconds, self._loaded_tokens + host_tokens
            request.at = _At.LOADING
            self._loading.append((self._copies_until_s, request))
            return
        self._begin_prefill(request)

    def _load_ended(self, request: _Request) -> None:
        if self._requests.get(request.job.number) is not request:
            return
        self._measured.loaded(self._loaded_s, self._loaded_tokens)
        self._cache.tiers.let_go(request.match.host, loaded=True)
        request.match.host.clear()
        self._begin_prefill(request)

    def _invalidate(self, request: _Request) -> None:
        """What the prompt has lost is computed again, from the beginning of its block on."""
        if request.kept < request.computed:
            kept = request.kept // self._settings.block_tokens * self._settings.block_tokens
            self.totals.invalidated_tokens += request.computed - kept
            request.computed = kept
        request.kept = _ALL

    def _begin_prefill(self, request: _Request) -> None:
        request.at = _At.PREFILLING
        self._prefilling.append(request)

    def _stored(self, blocks: int) -> None:
        tokens = blocks * self._settings.block_tokens
        self._copies_until_s = max(self._copies_until_s, self._now_s) + self._model.store_s(tokens)

    # Steps.

    def _end_s(self) -> float:
        return self._leap.end_s if self._leap is not None else _NEVER

    def _next_leap(self, now_s: float) -> _Leap | None:
        decoding = len(self._decoding)
        chunks = self._chunks(max(0, self._settings.max_batched_tokens - decoding))
        if chunks:
            tokens = sum(each for _, each in chunks)
            pairs = sum(each * (request.computed + each / 2) for request, each in chunks)
            work = StepWork(tokens, pairs, decoding, self._context, self._context - self._shared_tokens)
            return _Leap(now_s, self._model.step_s(work) * self._factor, 0.0, 1, chunks, decoding)
        if not decoding:
            return None
        steps = min(request.left for request in self._decoding)
        read = self._context - self._shared_tokens
        first_s, second_s = (
            self._model.step_s(StepWork(0, 0.0, decoding, self._context + grown, read + grown)) * self._factor
            for grown in (0, decoding)
        )
        return _Leap(now_s, first_s, second_s - first_s, steps, (), decoding)

    def _chunks(self, budget: int) -> tuple[tuple[_Request, int], ...]:
        chunks = []
        for request in self._prefilling:
            if not budget:
                break
            tokens = min(budget, request.known - request.computed)
            if tokens > 0:
                chunks.append((request, tokens))
                budget -= tokens
        return tuple(chunks)

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
        self._measured.stepped(
            seconds / leap.steps, [(each.computed, tokens) for each, tokens in leap.chunks], leap.decoding
        )
        self._decoded(leap.steps, now_s)
        for request, tokens in leap.chunks:
            if request.at is not _At.PREFILLING or request.job.number not in self._requests:
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

    def _prefilled(self, request: _Request, now_s: float) -> None:
        self._prefilling.remove(request)
        request.left -= 1
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
        request.at = _At.DECODING
        self._decoding.append(request)
        self._context += request.context
        for block in held[: len(hashes)]:
            readers = self._references.get(block, 0)
            self._references[block] = readers + 1
            self._shared_tokens += self._settings.block_tokens * (readers > 0)

    def _leave(self, request: _Request) -> None:
        self._decoding.remove(request)
        self._context -= request.context
        for block in request.held[: len(request.hashes)]:
            readers = self._references[block] - 1
            self._shared_tokens -= self._settings.block_tokens * (readers > 0)
            if readers:
                self._references[block] = readers
            else:
                del self._references[block]

    def _finished(self, request: _Request, now_s: float) -> None:
        self._outcomes.append(Outcome(request.job, OutcomeKind.FINISHED, now_s))
        if request.job.hand_off:
            request.at = _At.HELD
            self._running -= 1
        else:
            self._end(request)
        loaded = self._cache.promote() * self._settings.block_tokens
        if loaded:
            self._copies_until_s = max(self._copies_until_s, now_s) + self._model.load_s(loaded)

    def _end(self, request: _Request) -> None:
        """Its blocks are needed no more."""
        self._running -= request.at is not _At.HELD
        del self._requests[request.job.number]
        self._cache.free(request.held)


def _computable(job: SimJob, last: SimInput) -> int:
    """Of the prompt as it stands. While more may come, its last token is held back: nobody may sample after it."""
    return job.prompt_tokens if last.is_last else max(0, min(last.prompt_tokens, job.prompt_tokens) - 1)
