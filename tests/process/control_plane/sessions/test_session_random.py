"""Random sessions side by side through the real router: each gets the answer of its own prompt, or ends as it chose.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a session.
"""

import asyncio
import random
from typing import Any

import grpc
import pytest

from control_plane.model.lifecycle import State
from tests.fakes.answers import session_text, text_of
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster, until
from tests.fakes.session_call import SessionCall

SESSIONS = 40


async def play(cluster: Cluster, rng: random.Random) -> State:
    """One session; returns the outcome that it must be counted in."""
    mode = rng.choice(["APPEND", "UPDATE"])
    session = cluster.session()
    await session.open("hello", mode)
    context, refusals = await write(session, mode, rng)
    end = rng.choice(["finish", "finish", "finish", "cancel", "close", "leave", "finish and leave"])
    if end == "cancel":
        await session.send(cancel={})
    elif end == "close":
        await session.call.done_writing()
    elif end.startswith("finish"):
        await session.finish("!")
    if end.endswith("leave"):
        session.call.cancel()
        return State.CANCELLED
    if end != "finish":
        await told_refusals(session, refusals)
        assert (await session.failure()).code() is grpc.StatusCode.CANCELLED
        return State.CANCELLED
    await told_refusals(session, refusals)
    assert text_of(await session.answer()) == session_text(f"hello{context}!")
    return State.FINISHED


async def write(session: SessionCall, mode: str, rng: random.Random) -> tuple[str, int]:
    """The context that the session ends with, and how many of its messages are refused."""
    context, refusals = "", 0
    for revision in range(rng.randrange(12)):
        text = "".join(rng.choices("abc", k=rng.choice([0, 1, 5, 40])))
        move = rng.choice(["append", "update", "long", "nothing"])
        if move == "append":
            await session.append(text)
            context += text
        elif move == "update":
            text = context[: rng.randrange(len(context) + 1)] + text
            await session.update(revision, text)
            context = text if mode == "UPDATE" else context
        elif move == "long":
            await session.append("x" * 600)
        else:
            await asyncio.sleep(0)
        refusals += move == "long" or (move == "update" and mode == "APPEND")
    return context, refusals


async def told_refusals(session: SessionCall, count: int) -> None:
    for _ in range(count):
        await session.event("refused")


@pytest.mark.parametrize("seed", range(5))
async def test_random_sessions_get_their_own_answers_and_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    limits: dict[str, Any] = {"streaming__max_backlog_tokens": 30, "streaming__max_unapplied_inputs": 3}
    async with running_cluster(handoff__deadline_s=1.0, **limits) as cluster:
        for pool in (PREFILL, PREFILL, PREFILL, DECODE, DECODE):
            await cluster.add(pool)
        playing = [asyncio.create_task(play(cluster, random.Random(rng.random()))) for _ in range(SESSIONS)]
        if seed:
            # A worker is lost under whatever it has; two are left to take it over.
            await until(lambda: sum(cluster.outcomes.values()) > rng.randrange(SESSIONS // 2))
            cluster.workers[0].engine.die("of a test")

        outcomes = await asyncio.gather(*playing)

        await until(cluster.idle)
        await cluster.ends_with({state: outcomes.count(state) for state in set(outcomes)})
