"""How late the router's event loop is: what one client has it do, all others wait for."""

import asyncio
from collections.abc import Callable

# How often it is looked; a stall that is shorter is mostly not seen.
LOOK_S = 0.02


async def watch_loop(observe: Callable[[float], None], look_s: float = LOOK_S) -> None:
    """Until cancelled: seconds by which the loop came back later than it was asked to."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + look_s
        await asyncio.sleep(look_s)
        observe(max(0.0, loop.time() - due_s))
