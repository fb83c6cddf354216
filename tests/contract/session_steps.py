"""What tests do with a session of an engine: open it, wait until what came in is computed, and finish it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster_core.engine import Engine, EngineSession
from cluster_core.engine_jobs import EngineOutput, SessionMode, SessionProgress
from tests.contract.conftest import PROMPT, make_job

LONG = PROMPT * 4
OTHER = tuple(b"Another document altogether, of which nothing was ever said before. ")


@asynccontextmanager
async def opened(
    engine: Engine,
    prompt: tuple[int, ...] = (),
    mode: SessionMode = SessionMode.APPEND,
    *,
    max_tokens: int = 8,
    hand_off: bool = False,
) -> AsyncIterator[EngineSession]:
    session = engine.open_session(make_job(max_tokens, prompt=prompt, hand_off=hand_off), mode)
    try:
        yield session
    finally:
        session.close()


async def settled(session: EngineSession, inputs: int, prompt_tokens: int) -> SessionProgress:
    """Once so many inputs are taken in and all but the last token is computed."""

    def holds(progress: SessionProgress) -> bool:
        taken_in = (progress.inputs, progress.prompt_tokens) == (inputs, prompt_tokens)
        return taken_in and progress.ready_tokens >= prompt_tokens - 1

    async with asyncio.timeout(60):
        while not holds(session.progress()):
            await session.changed()
    return session.progress()


async def answer(session: EngineSession, last: tuple[int, ...] = ()) -> list[EngineOutput]:
    return [output async for output in session.finish(last)]
