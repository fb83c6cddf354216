"""How long the router's event loop is held up: what one client has it do, all others wait for.

A loop comes back late for two reasons: something held it, or others had the processors. The first is what a router can
do something about: at most the processor time that the loop's own thread took meanwhile. What other threads keep from
it by the interpreter's lock is among the second.
"""

import asyncio
import time
from collections.abc import Callable

# How often it is looked; a stall that is shorter is mostly not seen.
LOOK_S = 0.02


async def watch_loop(
    observe: Callable[[float, float], None],
    look_s: float = LOOK_S,
    worked_s: Callable[[], float] = time.thread_time,
) -> None:
    """Until cancelled. observe: seconds by which the loop came back late, and those of them that it worked itself.

    worked_s: processor time of the loop's thread.
    """
    loop = asyncio.get_running_loop()
    while True:
        due_s, before_s = loop.time() + look_s, worked_s()
        await asyncio.sleep(look_s)
        late_s = max(0.0, loop.time() - due_s)
        observe(late_s, min(late_s, worked_s() - before_s))
