"""One vLLM engine behind the engine protocol: the side that its callers see, on the asyncio loop.

The engine itself runs elsewhere, on a thread or in a process of its own (`engine_commands.EngineCoreClient`). Calls
become commands for it; what comes of a job reaches its caller through a `JobStream`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

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
from worker_runtime.engine_commands import EngineCoreClient
from worker_runtime.engine_sessions import SessionHandle
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.engine_thread import BringUp, EngineThread
from worker_runtime.engine_work import EngineWork
from worker_runtime.job_stream import JobStream
from worker_runtime.loaded_adapters import LoadedAdapters
from worker_runtime.vllm_start import bring_up_vllm

_Found = TypeVar("_Found")
_Items = asyncio.Queue[EngineOutput | Exception]


class VllmEngine:
    """See `cluster_core.engine.Engine`. Create, `start` once, `stop` once."""

    def __init__(
        self,
        settings: EngineSettings,
        clock: ClusterClock | None = None,
        bring_up: BringUp | None = None,
        core: EngineCoreClient | None = None,
    ) -> None:
        """clock: of the deadlines of pulls. bring_up: makes the engine; None: vLLM's, by the settings. core: where it
        runs; None: on a thread of this process, by the two before."""
        self._settings = settings
        self._core = core or EngineThread(bring_up or partial(bring_up_vllm, settings, clock or ClusterClock()))
        self._max_prompt_tokens = 0
        self._adapters = LoadedAdapters(
            settings.lora.max_loaded,
            digest_of=digest_apart,
            load=self._load_adapter,
            unload=self._unload_adapter,
        )

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        info = await self._core.start(on_phase, on_death)
        # The first token needs a place as well.
        self._max_prompt_tokens = info.max_model_len - 1
        return info

    def generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
        items: _Items = asyncio.Queue()
        stream = JobStream(job, items, skip_chars=job.emitted.sent_chars if job.emitted else 0)
        return self._outputs(stream, items, "add")

    async def _outputs(
        self, stream: JobStream, items: "_Items", command: str, *arguments: Any
    ) -> AsyncIterator[EngineOutput]:
        """What the stream yields once the command was carried out."""
        self._core.tell(command, stream, *arguments)
        try:
            while not stream.taken:
                item = await items.get()
                if isinstance(item, Exception):
                    stream.taken = True
                    raise item
                stream.taken = item.is_last
                yield item
        finally:
            if not stream.taken:
                self._core.tell("abandon", stream)

    def open_session(self, job: EngineJob, mode: SessionMode) -> EngineSession:
        if self._settings.role not in (EngineRole.PREFILL, EngineRole.SHARED):
            raise NotSupportedError("only engines that prefill for others have sessions")
        items: _Items = asyncio.Queue()
        stream, tell = JobStream(job, items), self._core.tell
        session = stream.session = SessionHandle(
            len(job.token_ids),
            self._max_prompt_tokens,
            extend=lambda tokens: tell("extend", stream, tokens),
            replace=lambda tokens: tell("replace", stream, tokens),
            finish=lambda tokens: self._outputs(stream, items, "close_input", tokens),
            abandon=lambda: None if stream.taken else tell("abandon", stream),
        )
        tell("open", stream, mode)
        return session

    async def hand_over(self, request_id: str) -> bool:
        return bool(await self._core.ask("hand_over", request_id))

    async def release(self, lease_id: str) -> bool:
        return bool(await self._core.ask("release", lease_id))

    def holding(self, adapter: Adapter | None) -> AbstractAsyncContextManager[str]:
        return self._adapters.holding(adapter)

    async def unload_adapter(self, digest: str) -> bool:
        return await self._adapters.unload(digest)

    def adapters(self) -> Sequence[str]:
        return self._adapters.digests

    async def _load_adapter(self, adapter: Adapter) -> None:
        try:
            failed: Exception | None = await self._core.ask("load_adapter", adapter, unless_left=True)
        except asyncio.CancelledError:
            # It may be loaded all the same, and would have a place that nobody knows of.
            self._core.order("unload_adapter", adapter.digest)
            raise
        if failed is not None:
            raise failed

    async def _unload_adapter(self, digest: str) -> None:
        await self._core.ask("unload_adapter", digest)

    def status(self) -> EngineStatus:
        return self._core.status()

    async def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        found: Sequence[HotPrefix] = await self._core.ask("hottest_prefixes", at_most, unless_left=True)
        return found

    async def decode_batch(self, at_most: int) -> DecodeBatch:
        found: DecodeBatch = await self._core.ask("decode_batch", at_most, unless_left=True)
        return found

    def follow_claims(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        self._core.follow(on_change)

    async def prefix_claims(self, on_look: Callable[[], None] = lambda: None) -> PrefixClaims:
        found: PrefixClaims = await self._core.ask("audited_claims", unless_left=True, on_place=on_look)
        return found

    async def look(self, question: Callable[[EngineWork], _Found]) -> _Found:
        """What `question` finds between two steps of an engine of this process; not asked where the caller has left."""
        assert isinstance(self._core, EngineThread), "the engine runs in a process of its own"
        return await self._core.answer(question, unless_left=True)

    async def stop(self) -> None:
        await self._core.stop()
