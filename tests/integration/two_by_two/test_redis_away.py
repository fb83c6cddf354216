"""What a router does while Redis is gone, and once it is back, with nothing in it."""

import asyncio
from typing import Any

import pytest
from rachis import AsyncClient, token_prompt
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation

from tests.integration.conftest import until
from tests.integration.two_by_two.conftest import TwoByTwo

pytestmark = pytest.mark.integration

PROMPT = [(5 * index) % 250 for index in range(200)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


async def test_running_and_new_requests_finish_when_redis_is_gone(two_by_two: TwoByTwo) -> None:
    async with two_by_two.another_router(index__max_staleness_s=1.0, placement__disaggregation="always") as client:
        long = {**GREEDY, "max_tokens": 400}
        running = asyncio.create_task(client.generate(token_prompt(PROMPT), **long))
        await until(lambda: _decodes(client), "a decode worker has the request")
        with two_by_two.redis.away():
            await until(lambda: _registry_lost(client), "the router noticed")
            assert len((await running).token_ids) == long["max_tokens"]
            later = await client.generate(token_prompt(PROMPT), **GREEDY)
            # On a busy machine it may come too late.
            assert later.completion.route.handoff in (
                generation.HANDOFF_OUTCOME_PULLED,
                generation.HANDOFF_OUTCOME_RECOMPUTED,
            )
            await until(lambda: _index_is(client, stale=True), "the index is too old to be believed")
            by_load = await client.generate(token_prompt([*PROMPT, 1]), **GREEDY)
            assert len(by_load.token_ids) == GREEDY["max_tokens"]
            assert (await client.admin.GetIndexStatus(admin.GetIndexStatusRequest())).load_only_decisions >= 2
        # It comes back empty, as after a FLUSHALL.
        for each in (client, two_by_two.client):
            await until(lambda each=each: _index_is(each, stale=False), "the index is followed again")  # type: ignore[misc]
            await until(lambda each=each: _index_is_true(each), "the workers have told it all again")  # type: ignore[misc]


async def _index_is(client: AsyncClient, *, stale: bool) -> bool:
    """A router may take the index for followed before the workers that it knows have written anything again."""
    status = await client.admin.GetIndexStatus(admin.GetIndexStatusRequest())
    return status.stale is stale and (stale or all(worker.in_sync for worker in status.workers))


async def _index_is_true(client: AsyncClient) -> bool:
    """Of all workers, as their engines' own block pools have it."""
    checked = (await client.admin.CheckIndex(admin.CheckIndexRequest())).workers
    tiers = [tier for check in checked for tier in (check.device, check.host)]
    differ = any(tier.untrue or tier.missing for tier in tiers)
    return len(checked) == 4 and not differ and all(check.device.agreed for check in checked)


async def _decodes(client: AsyncClient) -> bool:
    return any(
        view.in_flight_requests for view in await client.workers() if view.registration.worker_id.startswith("decode")
    )


async def _registry_lost(client: AsyncClient) -> bool:
    return not (await client.router_status()).registry_connected
