"""The choices of one request: several answers to one prompt, which is prefilled once.

The first choice goes ahead; the others begin once its first token has come. What it has computed is cached where it was
computed then, which draws them there, and they compute the last tokens of the prompt alone. From there on each is a
request of its own: a seed, a decode worker, losses and migrations.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from control_plane.dispatch.dispatcher import Dispatcher, Piece
from control_plane.model.job import Job

# Pieces that wait to be written, of all choices together.
_AHEAD = 16

Item = tuple[int, Piece] | BaseException | None


async def run_choices(dispatcher: Dispatcher, jobs: Sequence[Job]) -> AsyncIterator[tuple[int, Piece]]:
    """Yields pieces with the number of their choice, each choice's in order. Closing it early frees all that is held.

    Raises what `Dispatcher.run` does, for the first choice that fails; the others end with it.
    """
    if len(jobs) == 1:
        async with aclosing(dispatcher.run(jobs[0])) as answer:  # type: ignore[type-var]
            async for piece in answer:
                yield 0, piece
        return
    # Ends have room at all times: nobody waits for a choice that has ended.
    items, room, has_begun = asyncio.Queue[Item](), asyncio.Semaphore(_AHEAD), asyncio.Event()
    tasks = [asyncio.create_task(_run(dispatcher, jobs, choice, items, room, has_begun)) for choice in range(len(jobs))]
    running = len(tasks)
    try:
        while running:
            item = await items.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                room.release()
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _run(
    dispatcher: Dispatcher,
    jobs: Sequence[Job],
    choice: int,
    items: "asyncio.Queue[Item]",
    room: asyncio.Semaphore,
    has_begun: asyncio.Event,
) -> None:
    try:
        if choice:
            await has_begun.wait()
        async with aclosing(dispatcher.run(jobs[choice])) as answer:  # type: ignore[type-var]
            piece: Piece
            async for piece in answer:
                has_begun.set()
                await room.acquire()
                items.put_nowait((choice, piece))
        items.put_nowait(None)
    except asyncio.CancelledError as error:
        # By gRPC under a call as well, and not by whoever writes the answer alone.
        items.put_nowait(error)
        raise
    except Exception as error:  # noqa: BLE001 - whoever writes the answer raises it
        items.put_nowait(error)
