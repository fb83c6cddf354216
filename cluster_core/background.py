"""Tasks that their parent owns: remembered while they run, and ended with it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

logger = logging.getLogger(__name__)


def _is_a_defect(error: BaseException) -> None:
    logger.error("a task in the background failed on a defect", exc_info=error)


class BackgroundTasks:
    """What is started here runs on until it has ended, or until its parent waits for it or cancels it."""

    def __init__(self, on_failure: Callable[[BaseException], None] = _is_a_defect) -> None:
        """on_failure: gets what a task raised, once it has ended."""
        self._on_failure = on_failure
        # In the order of their start.
        self._running: dict[asyncio.Task[None], None] = {}

    def __len__(self) -> int:
        """Those that still run."""
        return len(self._running)

    def __iter__(self) -> Iterator["asyncio.Task[None]"]:
        return iter(tuple(self._running))

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    async def wait(self, timeout_s: float) -> None:
        """Returns once all have ended; those that take longer are cancelled."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def cancel(self) -> None:
        """Returns once all have ended."""
        tasks = tuple(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
