"""One in-process vLLM engine behind the engine protocol: the side that its callers see, on the asyncio loop.

The engine itself runs on a thread of its own (`worker_runtime.engine_thread`). Calls become commands for it; what comes
of a job reaches its caller through a `JobStream`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from cluster_core.clock import ClusterClock
from cluster_core.engine import EngineSession
from cluster_core.engine_jobs import Adapter, EngineJob, EngineOutput, SessionMode
from cluster_core.engine_reports import (
    DecodeBatch,
    EngineInfo,
    EngineStatus,
    HotPrefix,
    PrefixClaimChange,
    PrefixClaims,
)
from cluster_core.errors import NotSupportedError
from worker_runtime.adapter_files import digest_apart
from worker_runtime.engine_sessions import SessionHandle
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.engine_thread import BringUp, Command, EngineThread
from worker_runtime.engine_work import EngineWork
from worker_runtime.job_stream import JobStream
from worker_runtime.loaded_adapters import LoadedAdapters
from worker_runtime.vllm_start import bring_up_vllm

_Found = TypeVar("_Found")


class VllmEngine:
    """See `cluster_core.engine.Engine`. Create, `start` once, `stop` once."""

    def __init__(
        self, settings: EngineSettings, clock: ClusterClock | None = None, bring_up: BringUp | None = None
    ) -> None:
        """clock: of the deadlines of pulls. bring_up: makes the engine; None: vLLM's, by the settings."""
        self._settings = settings
        self._thread = EngineThread(bring_up or partial(bring_up_vllm, settings, clock or ClusterClock()))
        self._max_prompt_tokens = 0
        self._adapters = LoadedAdapters(
            settings.lora.max_loaded,
            digest_of=digest_apart,
            load=self._load_adapter,
            unload=self._unload_adapter,
        )

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        info = await self._thread.start(on_phase, on_death)
        # The first token needs a place as well.
        self._max_prompt_tokens = info.max_model_len - 1
        return info

    def generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
        stream = JobStream(job, skip_chars=job.emitted.sent_chars if job.emitted else 0)
        return self._outputs(stream, lambda work: work.jobs.add(stream))

    async def _outputs(self, stream: JobStream, start: Command) -> AsyncIterator[EngineOutput]:
        """What the stream yields once `start` was carried out."""
        self._thread.put(start)
        try:
            while not stream.taken:
                item = await stream.items.get()
                if isinstance(item, Exception):
                    stream.taken = True
                    raise item
                stream.taken = item.is_last
                yield item
        finally:
            if not stream.taken:
                self._thread.put(lambda work: work.jobs.abandon(stream))

    def open_session(self, job: EngineJob, mode: SessionMode) -> EngineSession:
        if self._settings.role not in (EngineRole.PREFILL, EngineRole.SHARED):
            raise NotSupportedError("only engines that prefill for others have sessions")
        stream, put = JobStream(job), self._thread.put
        stream.session = SessionHandle(
            len(job.token_ids),
            self._max_prompt_tokens,
            extend=lambda tokens: put(lambda work: work.jobs.take_in(stream, tokens, replaces=False)),
            replace=lambda tokens: put(lambda work: work.jobs.take_in(stream, tokens, replaces=True)),
            finish=lambda tokens: self._outputs(stream, lambda work: work.jobs.close_input(stream, tokens)),
            abandon=lambda: None if stream.taken else put(lambda work: work.jobs.abandon(stream)),
        )
        put(lambda work: work.jobs.open(stream, mode))
        return stream.session

    async def hand_over(self, request_id: str) -> bool:
        return await self._thread.answer(lambda work: work.jobs.hand_over(request_id))

    async def release(self, lease_id: str) -> bool:
        return await self._thread.answer(lambda work: work.jobs.release(lease_id))

    def holding(self, adapter: Adapter | None) -> AbstractAsyncContextManager[str]:
        return self._adapters.holding(adapter)

    async def unload_adapter(self, digest: str) -> bool:
        return await self._adapters.unload(digest)

    def adapters(self) -> Sequence[str]:
        return self._adapters.digests

    async def _load_adapter(self, adapter: Adapter) -> None:
        try:
            failed = await self._thread.answer(lambda work: work.load_adapter(adapter), unless_left=True)
        except asyncio.CancelledError:
            # It may be loaded all the same, and would have a place that nobody knows of.
            self._thread.put(lambda work: work.jobs.unload_adapter(adapter.digest))
            raise
        if failed is not None:
            raise failed

    async def _unload_adapter(self, digest: str) -> None:
        await self._thread.answer(lambda work: work.jobs.unload_adapter(digest))

    def status(self) -> EngineStatus:
        """A snapshot of when the last step had ended, but for how long the one that runs now hangs."""
        work, stalled_s = self._thread.work, self._thread.heartbeat.stalled_s
        status = work.figures.status if work is not None else EngineStatus()
        return replace(status, load=replace(status.load, stalled_s=stalled_s)) if stalled_s else status

    async def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        return await self.look(lambda work: work.hottest_prefixes(at_most))

    async def decode_batch(self, at_most: int) -> DecodeBatch:
        return await self.look(lambda work: work.decode_batch(at_most))

    def follow_claims(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        self._thread.put(lambda work: work.claims.follow(on_change))

    async def prefix_claims(self, on_look: Callable[[], None] = lambda: None) -> PrefixClaims:
        loop = asyncio.get_running_loop()

        def look(work: EngineWork) -> PrefixClaims:
            claims = work.audited_claims()
            loop.call_soon_threadsafe(on_look)
            return claims

        return await self.look(look)

    async def look(self, question: Callable[[EngineWork], _Found]) -> _Found:
        """What `question` finds on the engine's thread between two steps; not asked where the caller has left."""
        return await self._thread.answer(question, unless_left=True)

    async def stop(self) -> None:
        await self._thread.stop()
