"""Replays one trace of sessions against one engine, streamed or not, and times first tokens.

Every session is a task on the asyncio loop that the engine delivers to, in the engine's own process. That costs the
engine what a step's outputs and a session's inputs take of the interpreter (tens of microseconds each), the same for
every policy, and spares the figures the noise of a network between. A session's inputs are sent at their times in the
trace whatever the engine does meanwhile, and its times count from there: a load generator that comes late does not
make anybody's first token look early.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from cluster_core.clock import monotonic_s
from cluster_core.engine import Engine
from cluster_core.engine_jobs import EngineJob, EngineOutput, SamplingSpec, SessionMode, SessionRecord
from cluster_core.errors import RachisError, UnavailableError
from cluster_sim.workloads.streaming import GENERATED_TOKENS, TracedSession

# After the last input: whoever has no first token by then never gets one.
PATIENCE_S = 600.0
_SAMPLING = SamplingSpec(max_tokens=GENERATED_TOKENS, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """Both TTFTs of one session; record is what the engine tells of a streamed one."""

    ttft_from_open_ms: float
    ttft_after_finish_ms: float
    record: SessionRecord | None


@dataclass(frozen=True, slots=True)
class Replay:
    """When the sessions of a trace got their first tokens."""

    sessions: tuple[SessionTimes, ...]
    # From the trace's beginning until the last first token.
    completion_s: float

    def and_also(self, other: "Replay") -> "Replay":
        """One after the other."""
        return Replay(self.sessions + other.sessions, self.completion_s + other.completion_s)


async def replay(
    engine: Engine,
    trace: Sequence[TracedSession],
    on_done: Callable[[], None],
    *,
    streamed: bool,
    patience_s: float = PATIENCE_S,
) -> Replay:
    """One run. Raises what the engine raises, and UnavailableError when it has not ended in time.

    streamed: as sessions; else each final prompt is sent as one request when its context is complete.
    """
    send = _stream if streamed else _wait_for_context
    began_s = monotonic_s()

    async def one(index: int, session: TracedSession) -> SessionTimes:
        times = await send(engine, f"session-{index}", session, began_s)
        on_done()
        return times

    last_input_s = max(each.finish_s for each in trace)
    try:
        async with asyncio.timeout(last_input_s + patience_s), asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, session)) for index, session in enumerate(trace)]
    except TimeoutError:
        raise UnavailableError(f"the trace had not ended {patience_s:g} s after its last input") from None
    except ExceptionGroup as failures:
        # What one session was refused, or the engine's death, which all of them hear of.
        raise next((each for each in failures.exceptions if isinstance(each, RachisError)), failures) from None
    return Replay(tuple(task.result() for task in tasks), monotonic_s() - began_s)


async def _stream(engine: Engine, name: str, session: TracedSession, began_s: float) -> SessionTimes:
    await _until(began_s + session.arrival_s)
    handle = engine.open_session(EngineJob(name, session.prefix, _SAMPLING), session.mode)
    put = handle.update if session.mode is SessionMode.UPDATE else handle.append
    try:
        for each in session.inputs:
            await _until(began_s + each.at_s)
            put(each.tokens)
        return await _times(handle.finish(session.closing), session, began_s)
    finally:
        handle.close()


async def _wait_for_context(engine: Engine, name: str, session: TracedSession, began_s: float) -> SessionTimes:
    job = EngineJob(name, session.prompt, _SAMPLING)
    await _until(began_s + session.finish_s)
    return await _times(engine.generate(job), session, began_s)


async def _times(outputs: AsyncIterator[EngineOutput], session: TracedSession, began_s: float) -> SessionTimes:
    first_token_s: float | None = None
    record = None
    async for output in outputs:
        if first_token_s is None and output.token_ids:
            first_token_s = monotonic_s() - began_s
        record = output.session or record
    if first_token_s is None:
        raise UnavailableError("a session ended without a token")
    return SessionTimes((first_token_s - session.arrival_s) * 1000, (first_token_s - session.finish_s) * 1000, record)


async def _until(moment_s: float) -> None:
    await asyncio.sleep(max(0.0, moment_s - monotonic_s()))
