"""One in-process vLLM engine on a thread of its own, behind the engine protocol.

The thread owns the engine: commands reach it through a queue, outputs leave it in one batch per step for the
asyncio loop that started it. An engine that raises in a step is dead: every job fails with UnavailableError and
`on_death` is called, so that the worker's process can end and be started again.
"""

import asyncio
import logging
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster_core.clock import ClusterClock, monotonic_s
from cluster_core.engine import EngineSession
from cluster_core.engine_jobs import (
    EngineJob,
    EngineOutput,
    FinishReason,
    HandoffOutcome,
    HandoffReport,
    KvLease,
    SamplingSpec,
    SessionMode,
    SessionProgress,
)
from cluster_core.engine_reports import (
    DecodeBatch,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    EngineStatus,
    HotPrefix,
    PrefixClaimChange,
    PrefixClaims,
    TierReport,
)
from cluster_core.errors import InvalidInputError, NotSupportedError, StartError, UnavailableError
from kv_transfer import vllm_private
from kv_transfer.blocks import Tier
from kv_transfer.claims.chunk_claims import ChunkClaims
from kv_transfer.claims.prefix_chunks import root_key
from kv_transfer.handoff.lease_params import encode_params
from kv_transfer.handoff.rules import effective_deadline_s, stamp_deadline
from kv_transfer.tiers import report as tier_report
from worker_runtime.engine_sessions import SessionHandle, SessionPrompt
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.step_costs import StepCosts

logger = logging.getLogger(__name__)

# While only leases are held or blocks are on their way there is nothing to compute: the loop naps instead of spinning.
_NAP_S = 0.001
# A thread that hangs inside vLLM does not keep its process from ending.
_STOP_TIMEOUT_S = 20.0
_Found = TypeVar("_Found")
_WARM_UP = (
    SamplingSpec(max_tokens=2, temperature=0.0),
    SamplingSpec(max_tokens=2, seed=0, top_p=0.9, top_k=4, min_p=0.1, frequency_penalty=0.1, logprobs=1),
)


@dataclass(slots=True, eq=False)
class _Stream:
    """One job: written by the engine thread, read by its consumer through `items`."""

    job: EngineJob
    items: asyncio.Queue[EngineOutput | Exception] = field(default_factory=asyncio.Queue)
    internal_id: str = ""
    started: bool = False
    skip_chars: int = 0
    # Set by the consumer when it has taken the last output, by the thread when it has made it.
    taken: bool = False
    ended: bool = False
    session: SessionHandle | None = None
    prompt: SessionPrompt | None = None
    # Tokens that were found, pulled among them, and tokens that were generated.
    found_tokens: int = 0
    pulled_tokens: int = 0
    generated_tokens: int = 0


@contextmanager
def _own_cores() -> Iterator[None]:
    """This thread may run where it could before. Without a GPU, vLLM's NIXL connector binds the thread that makes it to
    the last core, for its copies: here that thread computes, and all engines of a machine would share one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class VllmEngine:
    """See `cluster_core.engine.Engine`. Create, `start` once, `stop` once. clock: of the deadlines of pulls."""

    def __init__(self, settings: EngineSettings, clock: ClusterClock | None = None) -> None:
        self._settings = settings
        self._clock = clock or ClusterClock()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._leases: dict[str, str] = {}
        self._counters = EngineCounters()
        self._status = EngineStatus()
        self._stopping = False
        self._dead: str | None = None
        self._max_prompt_tokens = 0
        self._block_size = 0
        self._block_bytes = 0
        self._costs = StepCosts()
        self._claims: ChunkClaims | None = None
        self._claims_group = 0
        self._follower: Callable[[PrefixClaimChange], None] | None = None
        self._thread: threading.Thread | None = None
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready, on_phase, on_death), name="engine", daemon=True)
        self._thread.start()
        return await ready

    def generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
        stream = _Stream(job, skip_chars=len(job.first.sent_text) if job.first else 0)
        return self._outputs(stream, lambda: self._add(stream))

    async def _outputs(self, stream: _Stream, start: Callable[[], None]) -> AsyncIterator[EngineOutput]:
        """What the stream yields once `start` has run on the engine thread."""
        self._commands.put(start)
        try:
            while not stream.taken:
                item = await stream.items.get()
                if isinstance(item, Exception):
                    stream.taken = True
                    raise item
                stream.taken = item.finish_reason is not None
                yield item
        finally:
            if not stream.taken:
                self._commands.put(lambda: self._abandon(stream))

    def open_session(self, job: EngineJob, mode: SessionMode) -> EngineSession:
        if self._settings.role is not EngineRole.PREFILL:
            raise NotSupportedError("only prefill engines have sessions")
        stream = _Stream(job)
        stream.session = SessionHandle(
            len(job.token_ids),
            self._max_prompt_tokens,
            extend=lambda tokens: self._commands.put(lambda: self._take_in(stream, tokens, replaces=False)),
            replace=lambda tokens: self._commands.put(lambda: self._take_in(stream, tokens, replaces=True)),
            finish=lambda tokens: self._outputs(stream, lambda: self._close_input(stream, tokens)),
            abandon=lambda: None if stream.taken else self._commands.put(lambda: self._abandon(stream)),
        )
        self._commands.put(lambda: self._open(stream, mode))
        return stream.session

    async def release(self, lease_id: str) -> bool:
        done: asyncio.Future[bool] = self._loop.create_future()
        self._commands.put(lambda: self._reply(done, self._release(lease_id)))
        return await done

    def status(self) -> EngineStatus:
        return self._status

    async def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        return await self._looked_up(lambda: self._hottest(at_most))

    async def decode_batch(self, at_most: int) -> DecodeBatch:
        return await self._looked_up(lambda: self._decode_batch(at_most))

    def follow_claims(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        self._commands.put(lambda: self._follow(on_change))

    async def prefix_claims(self, on_look: Callable[[], None] = lambda: None) -> PrefixClaims:
        def look() -> PrefixClaims:
            claims = self._audited_claims()
            self._loop.call_soon_threadsafe(on_look)
            return claims

        return await self._looked_up(look)

    async def _looked_up(self, look: Callable[[], _Found]) -> _Found:
        """What `look` finds on the engine thread."""
        found: asyncio.Future[_Found] = self._loop.create_future()
        # Who asked may have left before the engine has a moment.
        self._commands.put(lambda: None if found.cancelled() else self._reply(found, look()))
        return await found

    async def stop(self) -> None:
        self._stopping = True
        self._commands.put(lambda: None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)

    # Everything below runs on the engine thread.

    def _run(
        self, ready: asyncio.Future[EngineInfo], on_phase: Callable[[str], None], on_death: Callable[[str], None]
    ) -> None:
        try:
            info = self._build(on_phase)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises while starting is one fault: it did not start
            failure = StartError(f"the engine did not start: {type(error).__name__}: {error}")
            self._loop.call_soon_threadsafe(ready.set_exception, failure)
            return
        self._publish_status()
        self._reply(ready, info)
        try:
            self._work(on_death)
        finally:
            self._engine.engine_core.shutdown()

    def _work(self, on_death: Callable[[str], None]) -> None:
        """Turns until it is stopped. After the engine's death it still answers: that the engine is dead."""
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:  # noqa: BLE001 - top of the thread's loop: an engine that raised cannot go on
            self._die(f"{type(error).__name__}: {error}")
            on_death(f"{type(error).__name__}: {error}")
        else:
            self._die("it was stopped")
        while not self._stopping:
            self._obey(block=True)
        self._obey(block=False)

    def _build(self, on_phase: Callable[[str], None]) -> EngineInfo:
        on_phase("importing vLLM")
        from vllm import __version__ as version
        from vllm.v1.engine.llm_engine import LLMEngine

        from worker_runtime.vllm_arguments import engine_args, engine_info

        if version != vllm_private.SUPPORTED_VLLM:
            raise StartError(f"vLLM {version} is installed, Rachis works with {vllm_private.SUPPORTED_VLLM}")
        on_phase("loading the model")
        with _own_cores():
            self._engine = LLMEngine.from_engine_args(engine_args(self._settings))
        on_phase("warming up")
        self._warm_up()
        info = engine_info(self._engine, self._settings)
        # The first token needs a place as well.
        self._max_prompt_tokens = info.max_model_len - 1
        self._block_size = info.block_size_tokens
        self._block_bytes = vllm_private.block_bytes(self._engine)
        if self._settings.role is not EngineRole.ALONE:
            self._begin_claims()
        return info

    def _begin_claims(self) -> None:
        from kv_transfer.claims import block_events

        service_id, size = self._settings.service_id, self._block_size
        claims = ChunkClaims(
            lambda salt, adapter: root_key(service_id, salt, adapter),
            size,
            -(-self._settings.index.chunk_tokens // size),
        )
        group = self._claims_group = vllm_private.claims_group(self._engine)
        if group < 0:
            logger.warning("no layers of the model have full attention: the index is told of none of its prefixes")
        sink = block_events.EventSink(lambda events: block_events.apply(events, claims, group))
        vllm_private.hand_over_block_events(self._engine, sink)
        self._claims = claims

    def _warm_up(self) -> None:
        """Greedy and sampled tokens before anybody waits for them: what vLLM imports and allocates on first use."""
        from worker_runtime.vllm_conversion import prompt_of, sampling_params

        for index, sampling in enumerate(_WARM_UP):
            job = EngineJob(f"warm-up-{index}", (0,), sampling)
            self._engine.add_request(job.request_id, prompt_of(job), sampling_params(job))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _turn(self) -> None:
        """Carries out what is asked, then one engine step."""
        scheduler = vllm_private.scheduler_of(self._engine)
        if not self._commands.empty() or not scheduler.has_requests():
            self._obey(block=not scheduler.has_requests())
        if not scheduler.has_requests():
            self._publish_status()
            return
        began_s = monotonic_s()
        batch = self._step()
        self._count_step(monotonic_s() - began_s)
        self._tell_claims()
        self._tell_sessions()
        # Before the outputs: who has heard of a lease finds it in the status.
        self._publish_status()
        if batch:
            self._loop.call_soon_threadsafe(_deliver, batch)
        if not scheduler.running:
            self._obey(block=True, timeout_s=_NAP_S)

    def _obey(self, *, block: bool, timeout_s: float | None = None) -> None:
        try:
            self._commands.get(block, timeout_s)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            # What was taken in may leave nothing to compute: nobody would be told by a step.
            self._tell_sessions()

    def _step(self) -> list[tuple[_Stream, EngineOutput | Exception]]:
        batch: list[tuple[_Stream, EngineOutput | Exception]] = []
        for output in self._engine.step():
            stream = self._streams.get(output.request_id)
            if stream is not None:
                batch.append((stream, self._convert(stream, output)))
        return batch

    def _count_step(self, seconds: float) -> None:
        stepped = getattr(vllm_private.scheduler_of(self._engine), "stepped", None)
        if stepped is None:
            return
        scheduled = stepped.num_scheduled_tokens
        prefilled: list[tuple[int, int]] = []
        if stepped.total_num_scheduled_tokens > len(scheduled):
            going_on = stepped.scheduled_cached_reqs
            before = dict(zip(going_on.req_ids, going_on.num_computed_tokens, strict=True))
            before |= {new.req_id: new.num_computed_tokens for new in stepped.scheduled_new_reqs}
            prefilled = [(before[name], tokens) for name, tokens in scheduled.items() if tokens > 1]
        self._costs.stepped(seconds, prefilled, len(scheduled) - len(prefilled))

    def _tell_claims(self) -> None:
        claims = self._claims
        if claims is not None and claims.has_changed:
            change = claims.take()
            if self._follower is not None and change:
                self._loop.call_soon_threadsafe(self._follower, change)

    def _follow(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        self._tell_claims()
        self._follower = on_change
        claims = self._claims.claims() if self._claims is not None else PrefixClaims()
        change = PrefixClaimChange(dict.fromkeys(claims.device, True), dict.fromkeys(claims.host, True))
        self._loop.call_soon_threadsafe(on_change, change)

    def _audited_claims(self) -> PrefixClaims:
        """From what the pools hold. What has happened before the look is told before the answer."""
        from kv_transfer.claims import block_events

        if self._claims is None or self._dead is not None:
            return PrefixClaims()
        block_events.apply(vllm_private.take_block_events(self._engine), self._claims, self._claims_group)
        self._tell_claims()
        tiers = vllm_private.tiers_of(self._engine)
        in_host = [block_hash for _, block_hash in tiers.tree.items(Tier.HOST)] if tiers is not None else []
        return self._claims.audit(vllm_private.published_hashes(self._engine, self._claims_group), in_host)

    def _add(self, stream: _Stream) -> None:
        from worker_runtime.vllm_conversion import prompt_of

        def begin(params: Any) -> str:
            job = stream.job
            name: str = self._engine.add_request(job.request_id, prompt_of(job), params, priority=job.priority)
            self._counters.prompt_tokens += len(stream.job.token_ids)
            return name

        self._begin(stream, begin)

    def _open(self, stream: _Stream, mode: SessionMode) -> None:
        if self._dead is None and not vllm_private.scheduler_of(self._engine).sessions_allowed:
            self._fail(stream, NotSupportedError("this model's KV is not one list of blocks: it has no sessions"))
            return

        def begin(params: Any) -> str:
            stream.prompt = SessionPrompt(self._engine, stream.job, mode, params)
            return stream.prompt.internal_id

        self._begin(stream, begin)

    def _begin(self, stream: _Stream, begin: Callable[[Any], str]) -> None:
        """Starts a job by `begin`, which gets vLLM's parameters and returns its name there; what is refused fails."""
        from vllm.exceptions import VLLMClientError

        from worker_runtime.vllm_conversion import sampling_params

        if self._dead is not None:
            self._fail(stream, UnavailableError(f"the engine died: {self._dead}"))
            return
        try:
            if stream.job.request_id in self._streams or stream.job.request_id in self._leases:
                raise InvalidInputError("is running or leased already", field="request_id")
            stream.internal_id = begin(sampling_params(stream.job, self._pull_until_s(stream.job)))
        except InvalidInputError as error:
            self._fail(stream, error)
            return
        except (ValueError, TypeError, VLLMClientError) as error:
            self._fail(stream, InvalidInputError(str(error).strip(), field="request"))
            return
        self._streams[stream.job.request_id] = stream
        self._counters.requests += 1

    def _take_in(self, stream: _Stream, token_ids: Sequence[int], *, replaces: bool) -> None:
        if self._runs(stream) and stream.prompt is not None:
            stream.prompt.take_in(token_ids, replaces=replaces)

    def _close_input(self, stream: _Stream, token_ids: Sequence[int]) -> None:
        if self._runs(stream) and stream.prompt is not None:
            stream.prompt.close(token_ids)
            self._counters.prompt_tokens += stream.prompt.length

    def _runs(self, stream: _Stream) -> bool:
        return self._dead is None and self._streams.get(stream.job.request_id) is stream

    def _tell_sessions(self) -> None:
        """Lets the sessions' owners know how far they are."""
        told = []
        for stream in self._streams.values():
            if stream.session is not None and stream.prompt is not None:
                progress = stream.prompt.progress()
                if progress is not None and progress is not stream.session.told:
                    stream.session.told = progress
                    told.append((stream.session, progress))
        if told:
            self._loop.call_soon_threadsafe(_tell, told)

    def _abandon(self, stream: _Stream) -> None:
        """The consumer left: the job is aborted, or its lease ended where it had just finished."""
        if stream.ended:
            self._release(stream.job.request_id)
        elif self._runs(stream):
            del self._streams[stream.job.request_id]
            if stream.prompt is not None:
                stream.prompt.abort()
            else:
                self._engine.abort_request([stream.internal_id], internal=True)
            self._forget_pull(stream)

    def _release(self, lease_id: str) -> bool:
        """Ends a lease; a prefill that still runs under that name is aborted."""
        if self._dead is not None:
            return False
        stream = self._streams.get(lease_id)
        if stream is not None:
            self._abandon(stream)
            self._fail(stream, UnavailableError("the request was released"))
            return True
        internal_id = self._leases.pop(lease_id, None)
        if internal_id is None or internal_id not in vllm_private.leased_request_ids(self._engine):
            return False
        vllm_private.connector_of(self._engine).end_lease(internal_id)
        self._counters.handoffs_released += 1
        return True

    def _convert(self, stream: _Stream, output: Any) -> EngineOutput | Exception:
        """One vLLM output as ours: without the replayed first token, with what belongs to first and last outputs."""
        from worker_runtime.vllm_conversion import finish_reason, position_logprobs

        completion, job = output.outputs[0], stream.job
        tokens, text, rows = list(completion.token_ids), completion.text, list(completion.logprobs or ())
        try:
            reason = finish_reason(completion.finish_reason)
        except KeyError:
            self._end(stream)
            return UnavailableError(f"the engine ended the request with `{completion.finish_reason}`")
        first_output = not stream.started
        stream.generated_tokens += len(tokens)
        if first_output and job.first is not None:
            if tokens[:1] != [job.first.token_id]:
                raise AssertionError(f"replayed token {job.first.token_id}, sampled {tokens[:1]}")
            tokens, rows = tokens[1:], rows[1:]
        skipped = min(stream.skip_chars, len(text))
        stream.skip_chars -= skipped
        stream.started = True
        self._counters.generated_tokens += len(tokens)
        top = job.sampling.logprobs
        # Before the books are closed, which forgets the pull.
        first = self._first_output(stream, output) if first_output else {}
        stream.found_tokens = first.get("cached_tokens", stream.found_tokens)
        if reason is not None:
            self._counters.cacheable_requests += self._claims_group >= 0 and self._has_filled_a_block(stream)
        return EngineOutput(
            token_ids=tuple(tokens),
            text=text[skipped:],
            logprobs=tuple(
                position_logprobs(row, token, top or 0) for row, token in zip(rows, tokens, strict=top is not None)
            ),
            finish_reason=reason,
            lease=self._end(stream, output, reason) if reason is not None else None,
            session=stream.prompt.take_record() if reason is not None and stream.prompt is not None else None,
            **first,
        )

    def _first_output(self, stream: _Stream, output: Any) -> dict[str, Any]:
        stats = output.metrics
        if stream.prompt is not None:
            return {
                "cached_tokens": stream.prompt.cached_tokens(),
                "prefill_ms": (monotonic_s() - stream.prompt.closed_s) * 1000,
            }
        return {
            "cached_tokens": output.num_cached_tokens or 0,
            "queue_ms": max(0.0, stats.scheduled_ts - stats.queued_ts) * 1000 if stats else 0.0,
            "prefill_ms": max(0.0, stats.first_token_ts - stats.scheduled_ts) * 1000 if stats else 0.0,
            "handoff": self._report(stream),
        }

    def _report(self, stream: _Stream) -> HandoffReport | None:
        if stream.job.pull is None:
            return None
        report: HandoffReport = vllm_private.connector_of(self._engine).take_report(stream.internal_id)
        if report.outcome is HandoffOutcome.PULLED and report.pulled_tokens:
            stream.pulled_tokens = report.pulled_tokens
            self._costs.pulled(report.transfer_ms / 1000, report.pulled_tokens)
        return report

    def _has_filled_a_block(self, stream: _Stream) -> bool:
        """Whether a job's prompt has brought at least one full block that was not cached.

        What was generated does not count: the same request again generates the same, and brings nothing.
        """
        prompt_tokens = stream.prompt.length if stream.prompt is not None else len(stream.job.token_ids)
        found_blocks = stream.found_tokens // self._block_size
        if stream.found_tokens + self._block_size == prompt_tokens:
            # Of a prompt that is cached whole, vLLM computes the last block again.
            found_blocks += 1
        return prompt_tokens // self._block_size > found_blocks or stream.pulled_tokens >= self._block_size

    def _end(self, stream: _Stream, output: Any = None, reason: FinishReason | None = None) -> KvLease | None:
        """Closes the books of a job; returns its lease when it has one that is of use."""
        stream.ended = True
        self._streams.pop(stream.job.request_id, None)
        self._forget_pull(stream)
        params = getattr(output, "kv_transfer_params", None)
        if not stream.job.hand_off or not params:
            return None
        connector = vllm_private.connector_of(self._engine)
        if reason is not FinishReason.LENGTH:
            # The prompt was answered with its first token: nobody will pull.
            connector.end_lease(stream.internal_id)
            return None
        self._leases[stream.job.request_id] = stream.internal_id
        self._counters.handoffs_leased += 1
        deadline = stamp_deadline(self._clock.unix_ms(), self._settings.handoff.deadline_s)
        return KvLease(stream.job.request_id, encode_params(params), deadline)

    def _pull_until_s(self, job: EngineJob) -> float | None:
        if job.pull is None:
            return None
        stamped, deadline_s = job.pull.deadline_unix_ms, self._settings.handoff.deadline_s
        return effective_deadline_s(stamped, self._clock.unix_ms(), monotonic_s(), deadline_s)

    def _hottest(self, at_most: int) -> Sequence[HotPrefix]:
        tiers = vllm_private.tiers_of(self._engine) if self._dead is None else None
        return tier_report.hottest_prefixes(tiers, self._block_size, at_most) if tiers is not None else ()

    def _decode_batch(self, at_most: int) -> DecodeBatch:
        batch = vllm_private.decode_batch_of(self._engine, at_most) if self._dead is None else None
        return batch if batch is not None else DecodeBatch()

    def _tiers(self, capacity_blocks: int) -> TierReport | None:
        tiers = vllm_private.tiers_of(self._engine)
        return tier_report.tier_report(tiers, self._block_bytes, capacity_blocks) if tiers is not None else None

    def _forget_pull(self, stream: _Stream) -> None:
        if stream.job.pull is not None:
            vllm_private.connector_of(self._engine).pulls.forget(stream.internal_id)

    def _publish_status(self) -> None:
        leased = vllm_private.leased_request_ids(self._engine)
        self._leases = {name: internal for name, internal in self._leases.items() if internal in leased}
        running, waiting = vllm_private.queue_lengths(self._engine)
        free, total = vllm_private.block_counts(self._engine)
        if self._settings.role is not EngineRole.ALONE:
            connector = vllm_private.connector_of(self._engine)
            self._counters.kv_bytes_pulled = connector.kv_bytes_pulled
            self._counters.handoffs_expired = connector.handoffs_expired
            self._counters.handoffs_pulled = connector.handoffs_pulled
            self._counters.handoffs_recomputed = connector.handoffs_recomputed
        sessions, free_host, total_host = vllm_private.session_counts(self._engine)
        if self._claims is not None:
            self._counters.stored_blocks = self._claims.stored_blocks
        tiers = vllm_private.tiers_of(self._engine)
        if tiers is not None:
            counters, ranks = tiers.counters, self._settings.engine.tensor_parallel_size
            self._costs.loaded((counters.copy_out_s + counters.copy_back_s) / ranks, counters.timed * self._block_size)
        load = EngineLoad(running, waiting, len(leased), free, total, sessions, free_host, total_host)
        decode = vllm_private.decode_report_of(self._engine)
        self._status = EngineStatus(load, self._counters, self._tiers(total), decode, self._costs.costs())

    def _fail(self, stream: _Stream, error: Exception) -> None:
        if stream.session is not None:
            self._loop.call_soon_threadsafe(stream.session.fail, error)
        self._loop.call_soon_threadsafe(stream.items.put_nowait, error)

    def _die(self, why: str) -> None:
        self._dead = why
        for stream in self._streams.values():
            self._fail(stream, UnavailableError(f"the engine died: {why}"))
        self._streams.clear()

    def _reply(self, future: asyncio.Future[Any], value: Any) -> None:
        def settle() -> None:
            if not future.cancelled():
                future.set_result(value)

        self._loop.call_soon_threadsafe(settle)


def _deliver(batch: list[tuple[_Stream, EngineOutput | Exception]]) -> None:
    for stream, item in batch:
        stream.items.put_nowait(item)


def _tell(told: list[tuple[SessionHandle, SessionProgress]]) -> None:
    for session, progress in told:
        session.tell(progress)
