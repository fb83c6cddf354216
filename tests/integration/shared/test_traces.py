"""Where the time of requests of all kinds went, on real engines: stages add up, and workers' times are among them."""

import random

import pytest
from rachis import AsyncClient, text_prompt
from rachis.v1 import admin_pb2 as admin

pytestmark = pytest.mark.integration


async def test_the_stages_of_requests_and_sessions_add_up_to_their_time(client: AsyncClient) -> None:
    rng, seen = random.Random(3), set[str]()
    for number in range(12):
        name, prompt = f"traced-{number}", " ".join(f"k{rng.randrange(99)}=blue;" for _ in range(rng.randrange(1, 120)))
        if number % 3:
            await client.generate(text_prompt(prompt), request_id=name, max_tokens=rng.choice((1, 9)), temperature=0)
        else:
            async with client.session("Facts: ", request_id=name, temperature=0, max_tokens=4) as session:
                await session.append(prompt)
                _ = [delta async for delta in session.finish(" k1=")]
        told = await client.admin.GetTrace(admin.GetTraceRequest(request_id=name))
        took_ms = sum(stage.duration_ms for stage in told.answer.stages)
        assert took_ms == pytest.approx(told.answer.end_to_end_ms, rel=1e-6)
        seen |= {stage.name for stage in told.answer.stages}
    assert {"tokenization", "placement", "prefill_queue", "prefill_compute", "input", "pull", "decode"} <= seen
