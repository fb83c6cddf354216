"""An engine that computes nothing: every running job gets a token at each step, at a given rate. With it the service's
own work is measured.

Nothing is stored, pulled or leased. A step that is late is not made up for: a service that falls behind is seen in the
tokens that come.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from cluster_core.clock import monotonic_s
from cluster_core.engine import EngineSession
from cluster_core.engine_jobs import (
    Adapter,
    EngineJob,
    EngineOutput,
    FinishReason,
    SessionMode,
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
)
from cluster_core.errors import NotSupportedError

_TOKEN, _TEXT = 65, "A"


class PacedEngine:
    """See `cluster_core.engine.Engine`."""

    def __init__(self, info: EngineInfo, steps_per_s: float) -> None:
        self._info = info
        self._step_s = 1 / steps_per_s
        # By request: what it is given, and how many tokens it still gets.
        self._running: dict[str, tuple[asyncio.Queue[EngineOutput], int]] = {}
        self._work = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None
        self._counters = EngineCounters()

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        self._stepping = asyncio.create_task(self._step_on())
        return self._info

    async def generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
        items: asyncio.Queue[EngineOutput] = asyncio.Queue()
        emitted = job.emitted.token_ids if job.emitted is not None else ()
        self._running[job.request_id] = (items, job.sampling.max_tokens - len(emitted))
        self._counters.requests += 1
        self._work.set()
        try:
            while True:
                output = await items.get()
                yield output
                if output.is_last:
                    return
        finally:
            self._running.pop(job.request_id, None)

    async def _step_on(self) -> None:
        due_s = monotonic_s()
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
                due_s = monotonic_s()
            due_s = max(due_s + self._step_s, monotonic_s())
            await asyncio.sleep(max(0.0, due_s - monotonic_s()))
            for request_id, (items, left) in list(self._running.items()):
                if left > 1:
                    self._running[request_id] = (items, left - 1)
                    items.put_nowait(EngineOutput((_TOKEN,), _TEXT))
                else:
                    del self._running[request_id]
                    items.put_nowait(EngineOutput((_TOKEN,), _TEXT, finish_reason=FinishReason.LENGTH))

    def status(self) -> EngineStatus:
        return EngineStatus(EngineLoad(running_requests=len(self._running)), self._counters)

    async def stop(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            with suppress(asyncio.CancelledError):
                await self._stepping

    # What it has not.

    def open_session(self, job: EngineJob, mode: SessionMode) -> EngineSession:
        raise NotSupportedError("it has no sessions")

    async def hand_over(self, request_id: str) -> bool:
        return False

    async def release(self, lease_id: str) -> bool:
        return False

    @asynccontextmanager
    async def holding(self, adapter: Adapter | None) -> AsyncIterator[str]:
        yield ""

    async def unload_adapter(self, digest: str) -> bool:
        return False

    def adapters(self) -> Sequence[str]:
        return ()

    async def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        return ()

    async def decode_batch(self, at_most: int) -> DecodeBatch:
        return DecodeBatch()

    def follow_claims(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        """It caches nothing."""

    async def prefix_claims(self, on_look: Callable[[], None] = lambda: None) -> PrefixClaims:
        on_look()
        return PrefixClaims()
