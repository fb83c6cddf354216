"""Watches the heartbeat of a worker's engine: tells of an engine that hangs, and ends a worker whose engine does not
come back.

Looks are counted, not seconds: of a process that was frozen as a whole the clock says that its step took minutes, when
it goes on it is as well as before.
"""

import asyncio
import logging
from collections.abc import Callable

from cluster_core.engine import Engine

logger = logging.getLogger(__name__)

LOOK_S = 0.25


async def watch(
    engine: Engine, *, on_change: Callable[[], None], give_up: Callable[[str], None], give_up_after_s: float
) -> None:
    """Until cancelled. on_change: the engine hangs now, or works again. give_up: it has hung for so long."""
    looks = 0
    while True:
        await asyncio.sleep(LOOK_S)
        stalled_s = engine.status().load.stalled_s
        if bool(stalled_s) != bool(looks):
            logger.warning("the engine hangs in a step, a command or a copy" if stalled_s else "the engine goes on")
            on_change()
        looks = looks + 1 if stalled_s else 0
        if looks * LOOK_S >= give_up_after_s:
            give_up(f"it has been in one step, command or copy for {stalled_s:.0f} s")
            return
