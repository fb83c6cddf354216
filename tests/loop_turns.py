"""Waits for what comes in some turn of the event loop."""

import asyncio
import itertools
from collections.abc import Callable

# In each turn of the loop at first, for a second or more, and pure tests need no longer.
_EAGER_TURNS = 200_000
_LOOK_EVERY_S = 0.001


async def until(holds: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Lets everything else run until it is so; bounded, for what never comes: a busy machine takes its time.

    What comes at once is seen in the turn of the loop that it comes in, and acted on in the same; what takes longer is
    no reason to keep a core.
    """
    turns = itertools.count()
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - what is waited for sits in objects that know nothing of events
            await asyncio.sleep(0 if next(turns) < _EAGER_TURNS else _LOOK_EVERY_S)
