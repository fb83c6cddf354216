"""Keeps prompts from holding up those that decode: a step's chunk is bounded, and nobody who needs one token waits.

A mixin over `Scheduler` and `AsyncScheduler`, the first in the bases. Each step: of the budget every decode has its
token first, then every landed request, and prompts have the rest, as far as the TPOT objective of the decodes allows
(`decode_worker.step_bound`). vLLM's own `schedule` carries it out: it gets a smaller budget, and running prompts that
are limited to their part of it. Without an objective, a request that has landed or a pull that waits, nothing is
changed at all.

A landed request is one whose KV was pulled: it needs one token computed, to go on from where the other worker was.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from cluster_core.clock import monotonic_s
from cluster_core.engine_reports import EngineCosts
from cluster_core.objectives import ClassObjectives, RequestClass, class_of, objectives_by_class
from decode_worker.pulled import pulls
from decode_worker.step_bound import ALPHA, Chunk, Limit, PromptWork, StepRoom, bounded_chunk, spare_s, step_s
from kv_transfer import vllm_private
from kv_transfer.limited_request import last_step_runs, lift, limit

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object

KEY = "rachis_objectives"
# Of those that wait, how many are looked at: more than a step ever begins.
_WAITING = 64


@dataclass(frozen=True, slots=True)
class _Asked:
    """When a request came, and how much of its prompt lay on the device then, which may be gone when it begins."""

    at_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class _Begun:
    """When a request was first seen with tokens of its answer, and how many its client had then: those that came with
    it, or its first one."""

    at_s: float
    tokens: int


@dataclass(slots=True)
class _Work:
    """What there is to compute. decodes: how many tokens `tokens` need, running requests that need one; decoding: those
    of them that have begun to answer, or will have with the step that runs. prompts: those that run already. pulls:
    those that wait to be pulled; what is late, or lies here already, is computed after all. is_mixed: there are prompts
    and others; else vLLM's own schedule does."""

    decodes: int = 0
    tokens: list[Any] = field(default_factory=list)
    decoding: list[Any] = field(default_factory=list)
    landed: list[Any] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    waiting: list[Any] = field(default_factory=list)
    pulls: list[Any] = field(default_factory=list)
    is_mixed: bool = False


class ChunkBounding(_Scheduler):
    """See the module."""

    running: list[Any]
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given: Mapping[str, Any] = self.vllm_config.additional_config.get(KEY) or {"ttft_s": inf, "tpot_s": 0.0}
        self.objectives = objectives_by_class(given)
        # None has a TPOT: there is no bound, ever.
        self.has_bound = any(each.tpot_s for each in self.objectives.values())
        # Steps beside decodes, by what decided their chunk.
        self.chunks: Counter[Limit] = Counter()
        self._measured: Callable[[], EngineCosts] = EngineCosts
        self._asked: dict[str, _Asked] = {}
        self._decoding_since: dict[str, _Begun] = {}
        # What the step that was planned last should take: an asynchronous scheduler plans the next one while it runs.
        self._last_step_s = 0.0

    def use_costs(self, measured: Callable[[], EngineCosts]) -> None:
        """measured: what work costs in this engine. Until then no step is bounded."""
        self._measured = measured

    # vLLM's scheduler interface.

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.has_bound and request.request_id not in self._asked:
            now_s = monotonic_s()
            self._asked[request.request_id] = _Asked(now_s, self._cached_tokens(request))
            # Where another engine has answered so far, its client waits from now on.
            self._note(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        work = self._work()
        if work is None:
            return super().schedule(throttle_prefills)
        now_s = monotonic_s()
        prompts = self._prompts(work, now_s) if self.has_bound else []
        seconds = partial(step_s, self._measured(), prompts)
        if work.is_mixed:
            self._put_first(work.landed)
            with self._within(work, self._chunk(work, prompts, seconds, now_s)):
                output = super().schedule(throttle_prefills)
        else:
            output = super().schedule(throttle_prefills)
        # Who found no place has left its token to prompts.
        self._last_step_s = seconds(sum(each for each in output.num_scheduled_tokens.values() if each > 1))
        return output

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._asked.pop(request.request_id, None)
        self._decoding_since.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    # What a scheduler with other kinds of requests says of them.

    def _due_at_s(self, request: Any) -> float:
        """When the first token of a request is late, on the monotonic clock; never, where a client has it."""
        asked = self._asked.get(request.request_id)
        return inf if asked is None or request.num_output_tokens else asked.at_s + self._objectives_of(request).ttft_s

    def _left_tokens(self, request: Any) -> int:
        """What is to be computed of a prompt.

        A hit is believed until the request has begun, and never for its last block: what a belief costs that is wrong
        by then is one step with a block of it. Looking each of them up again in each step would cost more.
        """
        asked = self._asked.get(request.request_id)
        cached = asked.cached_tokens if asked is not None else 0
        has = request.num_computed_tokens or max(0, min(cached, request.num_tokens - self.block_size))
        return int(request.num_tokens - has)

    def _shares_out(self) -> bool:
        """Whether running prompts are limited here; else whoever plans the step does it within the budget."""
        return True

    # Its own.

    def _objectives_of(self, request: Any) -> ClassObjectives:
        return self.objectives[class_of(request.priority)]

    def _cached_tokens(self, request: Request) -> int:
        if pulls(request) or not request.num_tokens:
            return 0
        return int(self.kv_cache_manager.get_computed_blocks(request)[1])

    def _work(self) -> _Work | None:
        """None: nobody has an objective, and vLLM's own schedule does."""
        work = _Work(landed=[each for each in self.kv_holding_waiting if self._has_landed(each)])
        # Sessions that wait for input stand there, too, and are never begun.
        may_begin = (each for each in self.waiting if each.status is not RequestStatus.WAITING_FOR_STREAMING_REQ)
        for request in islice(may_begin, _WAITING):
            (work.pulls if pulls(request) else work.waiting).append(request)
        if not (work.landed or work.pulls or self.has_bound):
            return None
        for request in self.running:
            left = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            if left > 1:
                work.prompts.append(request)
            elif not last_step_runs(request):
                work.decodes += left
                work.tokens.append(request)
                if request.num_output_tokens or request.num_output_placeholders:
                    work.decoding.append(request)
                    self._note(request)
        landed = set(work.landed)
        for request in self.kv_holding_waiting:
            if request not in landed and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                work.waiting.insert(0, request)
        has_prompts = work.prompts or work.waiting or (work.pulls and self.has_bound)
        work.is_mixed = bool(has_prompts and (work.landed or work.decodes or (work.pulls and work.prompts)))
        return work if work.is_mixed or self.has_bound else None

    def _has_landed(self, request: Any) -> bool:
        is_due = request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ and not (
            request.num_stale_output_tokens and not request.drop_stale_output
        )
        if not is_due or not vllm_private.is_ready(self, request):
            return False
        return bool(request.num_computed_tokens and request.num_tokens - request.num_computed_tokens <= 1)

    def _put_first(self, landed: list[Any]) -> None:
        """vLLM serves those that hold blocks before others, in order."""
        queue = self.kv_holding_waiting
        if landed and list(islice(queue, len(landed))) != landed:
            queue.remove_requests(landed)
            for request in reversed(landed):
                queue.prepend_request(request)

    def _chunk(
        self, work: _Work, prompts: Sequence[PromptWork], seconds: Callable[[int], float], now_s: float
    ) -> Chunk:
        most = max(0, self.max_num_scheduled_tokens - work.decodes - len(work.landed))
        # The strictest objective of those who wait for this step is the bound.
        tpot_s = min((each for each in map(self._tpot_s, (*work.tokens, *work.landed)) if each), default=0.0)
        if not tpot_s:
            return Chunk(most, Limit.WORK)
        answering = (*work.decoding, *(each for each in work.landed if each.num_output_tokens))
        chunk = bounded_chunk(prompts, seconds, ALPHA * tpot_s, self._room(work, most), self._spare_s(answering, now_s))
        self.chunks[chunk.limit] += 1
        return chunk

    def _note(self, request: Request) -> None:
        """Since when it answers."""
        if self.has_bound and request.num_output_tokens and request.request_id not in self._decoding_since:
            self._decoding_since[request.request_id] = _Begun(monotonic_s(), request.num_output_tokens)

    def _prompts(self, work: _Work, now_s: float) -> list[PromptWork]:
        prompts = []
        for request in (*work.prompts, *work.waiting, *work.pulls):
            left = self._left_tokens(request)
            if left > 0:
                computed = max(0, request.num_tokens - left)
                prompts.append(PromptWork(computed, left, self._due_at_s(request) - now_s))
        return prompts

    def _spare_s(self, answering: Iterable[Any], now_s: float) -> float:
        """Of the class that has least: nine of ten of each have a say, however many the others are."""
        by_class: dict[RequestClass, list[Any]] = {}
        for request in answering:
            by_class.setdefault(class_of(request.priority), []).append(request)
        return min(
            (
                spare_s(tokens * tpot_s - took_s for tokens, took_s in self._progress(its, now_s))
                for whose, its in by_class.items()
                if (tpot_s := self.objectives[whose].tpot_s)
            ),
            default=inf,
        )

    def _tpot_s(self, request: Any) -> float:
        return self._objectives_of(request).tpot_s

    def _progress(self, decoding: Iterable[Any], now_s: float) -> Iterator[tuple[int, float]]:
        """Of each request, tokens and seconds since it began to answer, by when the step that is planned begins."""
        for request in decoding:
            begun = self._decoding_since.get(request.request_id)
            if begun is None:
                yield 0, 0.0
                continue
            tokens, seconds = request.num_output_tokens - begun.tokens, now_s - begun.at_s
            if request.num_output_placeholders:
                tokens, seconds = tokens + 1, seconds + self._last_step_s
            yield tokens, seconds

    def _room(self, work: _Work, most_tokens: int) -> StepRoom:
        needed = sum(
            -(-request.num_tokens // self.block_size) - -(-request.num_computed_tokens // self.block_size)
            for request in work.prompts
        )
        free = vllm_private.pool_of(self).get_num_free_blocks()
        begun = sum(request.num_tokens - request.num_computed_tokens for request in work.prompts)
        return StepRoom(most_tokens, self.block_size, begun, is_short=free < needed + work.decodes + len(work.landed))

    @contextmanager
    def _within(self, work: _Work, chunk: Chunk) -> Iterator[None]:
        """While the block runs, vLLM has the tokens of decodes, of landed requests and of the chunk, and running
        prompts take no more than the chunk."""
        budget, limited = self.max_num_scheduled_tokens, []
        self.max_num_scheduled_tokens = min(budget, work.decodes + len(work.landed) + chunk.tokens)
        # A pull takes none, but vLLM looks at nobody who waits once all are spent.
        left = chunk.tokens - (1 if work.pulls else 0)
        for request in work.prompts if self._shares_out() else ():
            wanted = request.num_tokens_with_spec - request.num_computed_tokens
            granted = max(0, min(wanted, left))
            left -= granted
            if granted < wanted:
                limit(request, granted)
                limited.append(request)
        try:
            yield
        finally:
            self.max_num_scheduled_tokens = budget
            for request in limited:
                lift(request)
