"""Answers from what retrievers find: the prompt is computed while they search.

Documents come into the prompt in the order in which they are found, so that none waits for another one's source.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import aclosing
from typing import Any

from rachis.prompts import Prompt
from rachis.session import AsyncSession
from rachis.v1 import generation_pb2 as generation


async def answer_from(
    session: AsyncSession, searches: Iterable[Awaitable[Iterable[Any]]], closing: Prompt | None = None
) -> AsyncGenerator[generation.CompletionDelta, None]:
    """Opens the session, appends what each search finds once it has, finishes it, and yields the answer.

    A search that fails ends the others and the session, and its error is raised. Closing the iterator early does, too.
    Raises as `AsyncSession.finish`.
    """
    running = [asyncio.ensure_future(search) for search in searches]
    try:
        async with session:
            for found in asyncio.as_completed(running):
                await session.append_all(await found)
            async with aclosing(session.finish(closing)) as deltas:
                async for delta in deltas:
                    yield delta
    finally:
        for search in running:
            search.cancel()
        await asyncio.gather(*running, return_exceptions=True)
