"""200 requests of all kinds over fake engines: each trace tells the way that its request went."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from control_plane.dispatch import worker_calls
from control_plane.model.request_trace import Interval, RequestTrace, TraceStage
from tests import stages
from tests.fakes.answers import completion_of
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, running_cluster, until
from tests.planting import planted

Ask = Callable[[Cluster, str, Random], Awaitable[generation.Completion]]
# Fake engines measure nothing: what would be theirs is part of the call.
_WHOLE = tuple(part for part in stages.WAYS["whole"] if part != "prefill")


@asynccontextmanager
async def pair(**flags: Any) -> AsyncIterator[Cluster]:
    async with running_cluster(**flags) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        yield cluster


async def text(cluster: Cluster, name: str, rng: Random) -> generation.Completion:
    return completion_of(await cluster.generate("a" * rng.randrange(1, 400), request_id=name))


async def tokens(cluster: Cluster, name: str, rng: Random) -> generation.Completion:
    request = api.GenerateRequest(request_id=name)
    request.prompt.token_ids.ids.extend(rng.choices(range(256), k=rng.randrange(1, 400)))
    request.sampling.temperature, request.sampling.max_tokens = 0.0, rng.randrange(2, 9)
    return (await _answers(cluster, request))[0]


async def one_token(cluster: Cluster, name: str, rng: Random) -> generation.Completion:
    return completion_of(await cluster.generate("a" * rng.randrange(1, 400), request_id=name, max_tokens=1))


async def sampled(cluster: Cluster, name: str, rng: Random) -> generation.Completion:
    return completion_of(await cluster.generate(request_id=name, temperature=1.0, top_p=0.9, seed=rng.randrange(99)))


async def append(cluster: Cluster, name: str, rng: Random) -> generation.Completion:
    session = cluster.session()
    await session.open("hello", request_id=name)
    for _ in range(rng.randrange(4)):
        await session.append("b" * rng.randrange(1, 50))
    return await _closed(session)


async def update(cluster: Cluster, name: str, rng: Random) -> generation.Completion:
    session = cluster.session()
    await session.open("hello", "UPDATE", request_id=name)
    for revision in range(1, rng.randrange(2, 5)):
        await session.update(revision, "c" * rng.randrange(1, 50))
    return await _closed(session)


KINDS: Sequence[tuple[Ask, int, str]] = (
    (text, 63, "both pools"),
    (tokens, 40, "both pools"),
    (one_token, 20, "one token"),
    (sampled, 20, "both pools"),
    (append, 15, "session"),
    (update, 15, "session"),
)


async def test_each_kind_of_request_tells_the_way_that_it_went_and_its_stages_add_up() -> None:
    rng, asked = Random(7), 0
    async with pair() as cluster:
        for ask, requests, way in KINDS:
            for number in range(requests):
                name = f"{ask.__name__}-{number}"
                completion = await ask(cluster, name, rng)
                told = await told_of(cluster, name)
                stages.went(told.answer, stages.WAYS[way])
                stages.agrees(told.answer, completion)
            asked += requests
        for group in (choices, refused, cancelled, migrated, whole):
            asked += await group(cluster)
    assert asked >= 200


async def choices(cluster: Cluster) -> int:
    for number in range(10):
        cluster.calls += 1
        request = api.GenerateRequest(request_id=f"choices-{number}", n=3)
        request.prompt.text = "hello"
        request.sampling.temperature, request.sampling.max_tokens = 0.0, 8
        completions = await _answers(cluster, request, counted=True)
        told = await told_of(cluster, request.request_id)
        stages.went(told.answer, stages.WAYS["both pools"])
        for choice, answer in enumerate((told.answer, *told.further_choices)):
            if choice:
                stages.went(answer, stages.WAYS["further choice"])
            stages.agrees(answer, completions[choice])
    return 10


async def refused(cluster: Cluster) -> int:
    for way, fields in (("malformed", {"temperature": -1.0}), ("too long", {"max_tokens": 10**6})):
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.generate(request_id=way, **fields)
        told = await told_of(cluster, way)
        assert told.outcome == "refused"
        stages.went(told.answer, stages.WAYS[way])
    return 2


async def cancelled(cluster: Cluster) -> int:
    """By their clients, while they decode."""
    engine = named(cluster, "decode-0").engine
    for number in range(5):
        engine.hold_before(4)
        call = cluster.call(request_id=f"cancelled-{number}")
        decodes = asyncio.Event()
        reading = asyncio.create_task(_read(call, decodes))
        await engine.held.wait()
        await decodes.wait()
        call.cancel()
        await asyncio.wait({reading})
        engine.resume()
        told = await told_of(cluster, f"cancelled-{number}")
        assert told.outcome == "cancelled"
        stages.went(told.answer, stages.WAYS["both pools"][:-1])
    return 5


async def migrated(cluster: Cluster) -> int:
    """As their decode workers die, one after the other."""
    for number in range(5):
        spare = await cluster.add(DECODE)
        engine = named(cluster, f"decode-{number}").engine
        engine.hold_before(4)
        answer = asyncio.create_task(cluster.generate(request_id=f"migrated-{number}", max_tokens=30))
        await engine.held.wait()
        engine.die("of a test")
        await answer
        told = await told_of(cluster, f"migrated-{number}")
        stages.went(told.answer, stages.WAYS["migrated"])
        assert told.answer.stages[-2].worker_id == spare.name
        await cluster.unregister(named(cluster, f"decode-{number}"))
    return 5


async def whole(cluster: Cluster) -> int:
    """Kept on the decode side, as nobody else is there to prefill."""
    await cluster.unregister(named(cluster, "prefill-0"))
    for number in range(10):
        await cluster.generate(request_id=f"whole-{number}")
        told = await told_of(cluster, f"whole-{number}")
        stages.went(told.answer, _WHOLE)
    return 10


async def told_of(cluster: Cluster, name: str) -> admin.GetTraceResponse:
    """Its trace, once it has ended: a client may hear of its end before the router has noted it."""
    await until(lambda: bool((found := cluster.parts.traces.find(name, None)) and found.outcome))
    told: admin.GetTraceResponse = await cluster.admin.GetTrace(admin.GetTraceRequest(request_id=name))
    return told


async def _answers(
    cluster: Cluster, request: api.GenerateRequest, *, counted: bool = False
) -> dict[int, generation.Completion]:
    """By choice."""
    cluster.calls += not counted
    responses = [response async for response in cluster.api.Generate(request)]
    return {each.choice: each.completion for each in responses if each.HasField("completion")}


async def _read(call: Any, decodes: asyncio.Event) -> None:
    """decodes: set with the second message; the first is of the prefill worker's token."""
    number = 0
    async for _ in call:
        number += 1
        if number > 1:
            decodes.set()


async def _closed(session: Any) -> generation.Completion:
    await session.finish(" world")
    (completion,) = [event.completion for event in await session.answer() if event.HasField("completion")]
    return completion  # type: ignore[no-any-return]


# Bugs that the checks have to see.


def forgotten(stage: TraceStage) -> Callable[..., None]:
    """A part that does not say that its stage begins."""
    enter = RequestTrace.enter

    def entered(trace: RequestTrace, entering: TraceStage, now_s: float, worker_id: str = "") -> None:
        if entering is not stage:
            enter(trace, entering, now_s, worker_id)

    return entered


def without_the_last(trace: RequestTrace, now_s: float) -> Iterator[Interval]:
    yield from list(_intervals(trace, now_s))[:-1]


def overlapping(trace: RequestTrace, now_s: float) -> Iterator[Interval]:
    """Each stage begins a little before the one in front of it has ended."""
    for each in _intervals(trace, now_s):
        yield each._replace(began_s=max(trace.began_s, each.began_s - 0.001))


def of_another_worker(trace: RequestTrace, stage: TraceStage, now_s: float, worker_id: str = "") -> None:
    _enter(trace, stage, now_s, worker_id and "prefill-0")


_intervals, _enter = RequestTrace.intervals, RequestTrace.enter


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        *((RequestTrace, "enter", forgotten(stage)) for stage in (
            TraceStage.TOKENIZATION, TraceStage.ADMISSION, TraceStage.PLACEMENT, TraceStage.PREFILL_CALL,
            TraceStage.FIRST_TOKEN, TraceStage.DECODE_PLACEMENT, TraceStage.DECODE_CALL, TraceStage.DECODE,
            TraceStage.COMPLETION,
        )),
        (RequestTrace, "enter", of_another_worker),
        (RequestTrace, "intervals", without_the_last),
        (RequestTrace, "intervals", overlapping),
        (worker_calls, "note_decode", lambda *_: None),
    ],
)  # fmt: skip
async def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, wrong: object) -> None:
    planted(monkeypatch, owner, name, wrong)
    async with pair() as cluster:
        completion = completion_of(await cluster.generate(request_id="mine"))
        told = await told_of(cluster, "mine")
        with pytest.raises((AssertionError, ValueError)):
            stages.went(told.answer, stages.WAYS["both pools"])
            stages.agrees(told.answer, completion)


async def test_a_session_whose_end_of_input_nobody_notes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, RequestTrace, "input_finished", lambda *_: None)
    async with pair() as cluster:
        await append(cluster, "mine", Random(1))
        with pytest.raises(AssertionError):
            stages.went((await told_of(cluster, "mine")).answer, stages.WAYS["session"])
