"""Sessions whose prefill worker dies: another one takes them over, or the decode worker computes the prompt."""

import functools
import os
import signal
from uuid import uuid4

import pytest
from rachis import AsyncClient, token_prompt
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from tests.integration.conftest import came_back, until, worker_of
from tests.integration.session_play import GREEDY, HANDED_OFF, collected, computed, prompt_tokens
from tests.integration.two_by_two.conftest import TwoByTwo, losing

pytestmark = pytest.mark.integration


async def test_a_session_goes_on_when_its_prefill_worker_is_killed(two_by_two: TwoByTwo) -> None:
    client, prompt = two_by_two.client, prompt_tokens(8, 1500)
    expected = await client.generate(token_prompt(prompt), cache_salt="asked alone", **GREEDY)
    async with losing(client, prefill=2, decode=0):
        # The other worker takes the session over, with the prompt as it stands.
        async with client.session(**GREEDY) as session:
            await session.append(prompt[:700])
            await until(functools.partial(computed, session, 1), "the first part is computed")
            first = session.prefill_worker_id
            pid, first_generation = await worker_of(client, first)
            os.kill(pid, signal.SIGKILL)
            await session.append(prompt[700:1400])
            await until(functools.partial(computed, session, 2), "the other worker is as far")
            reopened = await collected(session, prompt[1400:])
        second = reopened.completion.route.prefill_worker_id
        assert {first, second} == {"prefill-0", "prefill-1"}
        if reopened.completion.route.handoff not in HANDED_OFF:
            # On a busy machine a pull may be late: the prompt is computed again then. Others are pulled from there.
            assert reopened.completion.route.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
            await until(functools.partial(_is_handed_off_by, client, second), "a prompt is pulled from there")
        # Of what the first worker knew it computed all but the last token.
        assert reopened.completion.session.tokens.computed_tokens == 699 + 1500
        assert reopened.token_ids == expected.token_ids
        # Now there is no other one: the decode worker computes the prompt once it is whole.
        async with client.session(prompt[:700], **GREEDY) as session:
            assert session.prefill_worker_id == second
            pid, second_generation = await worker_of(client, second)
            os.kill(pid, signal.SIGKILL)
            await session.append(prompt[700:1400])
            recomputed = await collected(session, prompt[1400:])
        assert recomputed.token_ids == expected.token_ids
        route = recomputed.completion.route
        assert (route.prefill_worker_id, route.handoff) == ("", generation.HANDOFF_OUTCOME_NONE)
        assert not recomputed.completion.HasField("session")
        await until(functools.partial(_decode_workers_hold_nothing, client), "the blocks are back")
        for worker_id, before in ((first, first_generation), (second, second_generation)):
            await came_back(client, worker_id, before)


async def _is_handed_off_by(client: AsyncClient, prefill_worker_id: str) -> bool:
    asked = await client.generate(token_prompt(prompt_tokens(9, 300)), cache_salt=str(uuid4()), **GREEDY)
    route = asked.completion.route
    return route.prefill_worker_id == prefill_worker_id and route.handoff in HANDED_OFF


async def _decode_workers_hold_nothing(client: AsyncClient) -> bool:
    loads = [view.load for view in await client.workers() if view.registration.pool == wire.POOL_DECODE]
    return all(load.free_blocks == load.total_blocks > 0 and not load.running_requests for load in loads)
