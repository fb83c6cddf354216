"""200 requests of all kinds on real engines: the stages of each are those of its way, and add up to its time."""

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import pytest
from rachis import AsyncClient, Generated, chat_prompt, text_prompt, token_prompt
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from tests import stages
from tests.fakes.collector import Collector
from tests.integration.conftest import until
from tests.integration.session_play import collected, prompt_tokens

pytestmark = pytest.mark.integration

Ask = Callable[[AsyncClient, str, Random], Awaitable[Sequence[Generated]]]
AT_ONCE = 4
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
LONG_TOKENS = 1400
# What workers measure, each in their part of the requests.
MEASURED = {"prefill_queue", "prefill_compute", "pull", "decode_queue"}


async def text(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    prompt = " ".join(f"k{rng.randrange(99)}=blue;" for _ in range(rng.randrange(1, 40)))
    return [await client.generate(text_prompt(prompt), request_id=name, max_tokens=rng.randrange(2, 9), **GREEDY)]


async def chat(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    prompt = chat_prompt([{"role": "user", "content": f"k{rng.randrange(99)}=lime; k1="}])
    return [await client.generate(prompt, request_id=name, max_tokens=4, **GREEDY)]


async def tokens(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    prompt = token_prompt(prompt_tokens(rng.randrange(10**6), rng.randrange(1, 300)))
    return [await client.generate(prompt, request_id=name, max_tokens=rng.randrange(2, 9), **GREEDY)]


async def long(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    prompt = token_prompt(prompt_tokens(rng.randrange(10**6), LONG_TOKENS))
    return [await client.generate(prompt, request_id=name, max_tokens=4, **GREEDY)]


async def one_token(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    prompt = token_prompt(prompt_tokens(rng.randrange(10**6), rng.randrange(1, 300)))
    return [await client.generate(prompt, request_id=name, max_tokens=1, **GREEDY)]


async def sampled(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    sampling: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": rng.randrange(99),
        "ignore_eos": True,
        "max_tokens": 6,
    }
    return [await client.generate(text_prompt(f"k{rng.randrange(99)}="), request_id=name, **sampling)]


async def logprobs(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    prompt = token_prompt(prompt_tokens(rng.randrange(10**6), 40))
    sampling = {**GREEDY, "logprobs": 3, "prompt_logprobs": 2, "max_tokens": 5}
    return [await client.generate(prompt, request_id=name, **sampling)]


async def grammar(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    wanted = generation.StructuredOutputs(regex="[a-f]{3}-[0-9]{2}")
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "structured_outputs": wanted}
    return [await client.generate(text_prompt(f"k{rng.randrange(99)}="), request_id=name, **sampling)]


async def choices(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    prompt = token_prompt(prompt_tokens(rng.randrange(10**6), 100))
    sampling: dict[str, Any] = {"temperature": 0.9, "seed": 1, "ignore_eos": True, "max_tokens": 4}
    return await client.generate_choices(prompt, 2, request_id=name, **sampling)


async def append(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    prompt = prompt_tokens(rng.randrange(10**6), rng.randrange(100, 500))
    async with client.session(prompt[:40], request_id=name, max_tokens=4, **GREEDY) as session:
        await session.append(prompt[40:80])
        await session.append(prompt[80:])
        return [await collected(session)]


async def update(client: AsyncClient, name: str, rng: Random) -> Sequence[Generated]:
    prompt = prompt_tokens(rng.randrange(10**6), rng.randrange(100, 500))
    async with client.session(prompt[:40], mode="update", request_id=name, max_tokens=4, **GREEDY) as session:
        await session.update(prompt[40:60])
        await session.update(prompt[40:-10])
        return [await collected(session, prompt[-10:])]


KINDS: Sequence[tuple[Ask, int, str]] = (
    (text, 30, "both pools"),
    (chat, 10, "both pools"),
    (tokens, 40, "both pools"),
    (long, 15, "both pools"),
    (one_token, 20, "one token"),
    (sampled, 15, "both pools"),
    (logprobs, 10, "both pools"),
    (grammar, 5, "both pools"),
    (choices, 10, "both pools"),
    (append, 15, "session"),
    (update, 15, "session"),
)
WHOLE = 15
# Answers of the 200 that may go another way: on a busy machine a worker does not say in time that it lives, is left,
# and gets nothing until it does.
MOST_ELSEWHERE = 60


async def test_the_stages_of_200_requests_of_all_kinds_are_those_of_their_way_and_add_up(client: AsyncClient) -> None:
    rng = Random(3)
    asked = [(kind, f"{kind.__name__}-{number}", way) for kind, count, way in KINDS for number in range(count)]
    rng.shuffle(asked)
    seen: Counter[str] = Counter()
    await _ask_all(client, asked, seen)
    await client.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="prefill-0"))
    await until(functools.partial(_is, client, wire.WORKER_STATE_DRAINING), "prefill-0 drains")
    # Nobody else prefills: they are kept on the decode side.
    await _ask_all(client, [(tokens, f"whole-{number}", "whole") for number in range(WHOLE)], seen)
    await client.admin.ResumeWorker(admin.ResumeWorkerRequest(worker_id="prefill-0"))
    await until(functools.partial(_is, client, wire.WORKER_STATE_READY), "prefill-0 is back")
    assert seen["requests"] == sum(count for _, count, _ in KINDS) + WHOLE == 200
    assert set(seen) >= MEASURED and seen["left"] + seen["kept"] <= MOST_ELSEWHERE, seen
    assert seen["left"] or not seen["kept"], "who gets nothing has been left by somebody"


async def test_vllms_own_spans_are_below_the_span_of_their_request_where_its_trace_is_drawn(
    client: AsyncClient, collector: Collector
) -> None:
    drawn = client.with_metadata((("traceparent", f"00-{0xABC:032x}-{0xDEF:016x}-01"),))
    asked = ((client, tokens, "not drawn"), (drawn, tokens, "drawn"), (drawn, append, "drawn session"))
    for caller, ask, name in asked:
        await ask(caller, name, Random(name))
    trace_ids = {name: (await _ended_trace(client, name)).trace_id for _, _, name in asked}
    assert int(trace_ids["drawn"], 16) == 0xABC

    for name, kind in (("drawn", "rachis.request"), ("drawn session", "rachis.session")):

        async def are_told(trace_id: str = trace_ids[name], kind: str = kind) -> bool:
            """One of the prefill worker's engine, one of the decode worker's."""
            whole, engines = collector.named(kind, trace_id), collector.named("llm_request", trace_id)
            return len(engines) == 2 and [span.span_id for span in whole] == [engines[0].parent_span_id]

        await until(are_told, f"the spans of both engines are below that of {name}")
        engines = collector.named("llm_request", trace_ids[name])
        assert engines[0].parent_span_id == engines[1].parent_span_id
    assert not collector.named("llm_request", trace_ids["not drawn"])


async def test_a_collector_that_hangs_keeps_nobody_and_gets_what_comes_after(
    client: AsyncClient, collector: Collector
) -> None:
    drawn = client.with_metadata((("traceparent", f"00-{0xFAD:032x}-{0xDEF:016x}-01"),))
    with collector.hanging():
        await asyncio.gather(*(tokens(drawn, f"kept-{number}", Random(number)) for number in range(60)))

        async def keeps_all() -> bool:
            return len(collector.kept) >= 3

        await until(keeps_all, "router, prefill worker and decode worker wait for it")
        await asyncio.gather(*(tokens(drawn, f"kept-on-{number}", Random(number)) for number in range(60)))
    later = client.with_metadata((("traceparent", f"00-{0xFAE:032x}-{0xDEF:016x}-01"),))
    asks = itertools.count()

    async def are_told() -> bool:
        """Of whom it kept, each goes on to tell."""
        await tokens(later, f"later-{next(asks)}", Random(1))
        engines = collector.named("llm_request", f"{0xFAE:032x}")
        return len(engines) >= 2 and bool(collector.named("rachis.request", f"{0xFAE:032x}"))

    await until(are_told, "spans of router and engines come again")


async def _ended_trace(client: AsyncClient, name: str) -> admin.GetTraceResponse:
    told: admin.GetTraceResponse = await until(
        functools.partial(_ended, client, name), f"the trace of {name} has ended"
    )
    return told


async def _ask_all(client: AsyncClient, asked: Sequence[tuple[Ask, str, str]], seen: Counter[str]) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(ask: Ask, name: str, way: str) -> None:
        async with slots:
            began_s = monotonic_s()
            answers = await ask(client, name, Random(name))
            took_ms = (monotonic_s() - began_s) * 1000
            told = await _ended_trace(client, name)
        assert told.outcome == "finished"
        for number, (answer, answered) in enumerate(zip((told.answer, *told.further_choices), answers, strict=True)):
            has_left = stages.has_left(answer)
            if has_left or (way != "whole" and _nobody_prefills(told)):
                stages.adds_up(answer)
                seen["left" if has_left else "kept"] += 1
                continue
            stages.went(answer, stages.WAYS["further choice" if number else way])
            stages.agrees(answer, answered.completion, took_ms)
            seen.update(stage.name for stage in answer.stages)
        seen["requests"] += 1

    async with asyncio.TaskGroup() as group:
        for each in asked:
            group.create_task(one(*each))


def _nobody_prefills(told: admin.GetTraceResponse) -> bool:
    """Nobody could be chosen for it there."""
    return any(each.pool == wire.POOL_PREFILL and not each.worker_id for each in told.decisions)


async def _ended(client: AsyncClient, name: str) -> admin.GetTraceResponse | None:
    """A client may hear of its end before the router has noted it."""
    told: admin.GetTraceResponse = await client.admin.GetTrace(admin.GetTraceRequest(request_id=name))
    return told if told.outcome else None


async def _is(client: AsyncClient, state: wire.WorkerState.ValueType) -> bool:
    (record,) = [each.registration for each in await client.workers() if each.registration.worker_id == "prefill-0"]
    return record.state == state
