"""The loop of every part that does the same thing with Redis again and again, and outlives whatever fails.

Redis that does not answer is waited for, never fatal. The log says once that it is away and once that it is back; a
defect, which is anything else that is raised, is logged with its traceback when it begins.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster_wire.redis_client import REDIS_DOWN, not_cancelled


@dataclass(frozen=True, slots=True)
class LoopWords:
    """What the log says. away: with one `%s` for the error."""

    logger: logging.Logger
    away: str
    back: str
    defect: str
    # Of the first two.
    level: int = logging.WARNING


async def _nothing() -> None:
    """A part that has nothing to put right."""


class RedisLoop:
    """`run` until its task is cancelled."""

    def __init__(
        self,
        step: Callable[[], Awaitable[object]],
        pause: Callable[[], Awaitable[object]],
        words: LoopWords,
        *,
        on_outage: Callable[[], Awaitable[None]] = _nothing,
        on_defect: Callable[[], Awaitable[None]] = _nothing,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """step: one try. pause: after each. on_outage, on_defect: put right what a try left behind, before the flags
        and the log say that it failed. goes_on: false ends the loop."""
        self._step = step
        self._pause = pause
        self._words = words
        self._on_outage = on_outage
        self._on_defect = on_defect
        self._goes_on = goes_on
        # False from when Redis does not answer until a try has worked.
        self.connected = True
        # True from a defect until a try has worked.
        self.has_defect = False
        # Each defect is logged once until a try has worked.
        self._logged_defect = ""

    @property
    def is_well(self) -> bool:
        return self.connected and not self.has_defect

    async def run(self) -> None:
        # Cancelling may be swallowed inside a call of Redis; see `not_cancelled`.
        while self._goes_on() and not_cancelled():
            try:
                await self._step()
            except REDIS_DOWN as error:
                await self._on_outage()
                if self.connected:
                    self._words.logger.log(self._words.level, self._words.away, error)
                self.connected = False
            except Exception as error:
                await self._on_defect()
                if repr(error) != self._logged_defect:
                    self._logged_defect = repr(error)
                    self._words.logger.error(self._words.defect, exc_info=error)
                self.has_defect = True
            else:
                if not self.is_well:
                    self._words.logger.log(self._words.level, self._words.back)
                self.connected, self.has_defect, self._logged_defect = True, False, ""
            if not_cancelled():
                await self._pause()
