"""How a command that runs until a signal hears of it."""

import asyncio
import signal


def signalled() -> asyncio.Event:
    """Set by Ctrl-C or SIGTERM from now on."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


async def done_before(task: asyncio.Task[None], stopped: asyncio.Event) -> bool:
    """Whether it is; else it is cancelled."""
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
        return False
    return True
