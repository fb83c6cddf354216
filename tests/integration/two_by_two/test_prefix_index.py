"""The prefix index on a real cluster of two by two: what it says is true, whatever happens to the workers."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation

from control_plane.placement.disaggregation import LOCAL, Reason
from tests.integration.conftest import CHUNK_TOKENS, came_back, worker_of
from tests.integration.prefix_families import FAMILIES, PREFIX_CHUNKS, PREFIX_TOKENS, Families, claims_are_true
from tests.integration.two_by_two.conftest import TwoByTwo, losing

pytestmark = pytest.mark.integration

_MOST_ASKED = 30


@pytest_asyncio.fixture(scope="module")
async def by_prefix(two_by_two: TwoByTwo) -> AsyncIterator[AsyncClient]:
    """The default policy's prices are measured: on a busy machine a worker may seem so slow that hits do not matter."""
    flags = {"placement__policy": "prefix_only", "placement__disaggregation": "always"}
    async with two_by_two.another_router(index__chunk_tokens=CHUNK_TOKENS, **flags) as client:
        yield client


@pytest.fixture
def families(by_prefix: AsyncClient) -> Families:
    return Families(by_prefix)


async def test_prefixes_are_prefilled_once_and_found_again_and_claims_stay_true(
    two_by_two: TwoByTwo, families: Families
) -> None:
    first = [await families.ask(family, 0) for family in range(FAMILIES)]
    # On a busy machine a prefill worker may seem to hang: another one gets it, or a decode worker does it all.
    placed = {family: answer.completion.route.prefill_worker_id for family, answer in enumerate(first)}
    assert set(placed.values()) <= {"prefill-0", "prefill-1", ""}
    found = [family for family, worker_id in placed.items() if worker_id]
    assert 2 * len(found) > FAMILIES
    assert all(answer.completion.usage.cached_tokens == 0 for answer in first)
    # On a busy machine workers tell of it later than a router believes its own predictions.
    await claims_are_true(families.client, 4, at_least=len(found) * PREFIX_CHUNKS)

    again = [(family, await families.ask(family, closing)) for closing in (1, 2, 3) for family in found]

    prefilled = [(family, answer) for family, answer in again if answer.completion.route.prefill_worker_id]
    assert 2 * len(prefilled) > len(again)
    at_home = [answer for family, answer in prefilled if answer.completion.route.prefill_worker_id == placed[family]]
    assert 2 * len(at_home) > len(prefilled), "it goes where its prefix is"
    for answer in at_home:
        assert answer.completion.usage.cached_tokens == PREFIX_TOKENS, "and computes none of it"
    have = {(family, answer.completion.route.prefill_worker_id) for family, answer in [*enumerate(first), *again]}
    for family in found:
        answer = await families.ask(family, 4, client=two_by_two.client)
        prefilled_by = answer.completion.route.prefill_worker_id
        if not prefilled_by:
            # A decode worker did it all, which may have pulled the prefix before.
            continue
        has_it = (family, prefilled_by) in have
        assert answer.completion.usage.cached_tokens == has_it * PREFIX_TOKENS, "whatever the default policy chose"
    await claims_are_true(families.client, 4, at_least=len(found) * PREFIX_CHUNKS)


async def test_another_tenant_s_prompt_finds_nothing(families: Families) -> None:
    await families.ask(0, 0, cache_salt="one")
    mine = await families.ask(0, 1, cache_salt="one")
    other = await families.ask(0, 2, cache_salt="two")
    assert mine.completion.usage.cached_tokens == PREFIX_TOKENS
    assert other.completion.usage.cached_tokens == 0
    await claims_are_true(families.client, 4, at_least=2 * PREFIX_CHUNKS)


async def test_a_burst_of_siblings_computes_their_prefix_once_on_each_worker_that_has_one(
    two_by_two: TwoByTwo, families: Families
) -> None:
    """They are placed before any worker has told of a block. Whether they stay together is a matter of what prefills
    are measured to cost, on a busy machine as much: `tests/pure/control_plane/placement` has it with known costs."""
    answers = await asyncio.gather(*(families.ask(7, closing, client=two_by_two.client) for closing in range(6)))
    workers = Counter(answer.completion.route.prefill_worker_id for answer in answers)
    # One more than the first may be in its first step.
    reused = len(answers) - 2 * len(workers)
    assert sum(answer.completion.usage.cached_tokens for answer in answers) >= reused * PREFIX_TOKENS, workers


async def test_a_prompt_goes_the_way_that_its_prices_say_and_is_prefilled_once_on_either(
    two_by_two: TwoByTwo, families: Families
) -> None:
    """Prices are measured: on a busy machine either way may be the dearer one, for long and for short remainders. An
    answer may move to another worker there, and is placed once more for that."""
    async with two_by_two.another_router(
        index__chunk_tokens=CHUNK_TOKENS, placement__disaggregation="conditional"
    ) as client:
        first = await families.ask(0, 0, client=client)
        reasons = await _reasons(client)
        assert set(reasons) <= {"long_remainder", "prefill_slow"}, first
        assert reasons.total() == 1 + first.completion.route.migrations
        asked = 1
        # On a busy machine a decode worker's time may be so dear that no remainder is worth it.
        while not (await _reasons(client))["short_remainder"] and asked < _MOST_ASKED:
            before = await _reasons(client)
            answer = await families.ask(0, asked, client=client)
            asked += 1
            route, cached = answer.completion.route, answer.completion.usage.cached_tokens
            if route.migrations:
                continue
            reason = Reason(next(iter(await _reasons(client) - before)))
            assert bool(route.prefill_worker_id) == (reason not in LOCAL), (reason, route)
            if reason is Reason.SHORT_REMAINDER:
                assert route.handoff == generation.HANDOFF_OUTCOME_NONE
                assert cached == PREFIX_TOKENS


async def _reasons(client: AsyncClient) -> Counter[str]:
    """Why prompts went the way they did, since the router started."""
    return Counter((await client.admin.GetIndexStatus(admin.GetIndexStatusRequest())).disaggregation)


async def test_a_killed_worker_s_claims_are_void_and_those_of_its_next_start_are_true(
    two_by_two: TwoByTwo, families: Families
) -> None:
    client = families.client
    for closing in (0, 1):
        for family in range(FAMILIES):
            await families.ask(family, closing)
    await claims_are_true(client, 4, at_least=1)

    async with losing(two_by_two.client, prefill=1, decode=1):
        for worker_id in ("prefill-0", "decode-1"):
            pid, number = await worker_of(client, worker_id)
            os.kill(pid, signal.SIGKILL)
            for family in range(FAMILIES):
                await families.ask(family, 2)
            await came_back(client, worker_id, number)
            await claims_are_true(client, 4, at_least=1)
            again = [await families.ask(family, closing) for closing in (0, 3) for family in range(FAMILIES)]
            handoffs = Counter(answer.completion.route.handoff for answer in again)
            # On a busy machine a pull may be overdue.
            assert set(handoffs) <= {generation.HANDOFF_OUTCOME_PULLED, generation.HANDOFF_OUTCOME_RECOMPUTED}
            assert handoffs[generation.HANDOFF_OUTCOME_PULLED]
            await claims_are_true(client, 4, at_least=FAMILIES * PREFIX_CHUNKS)

    late = [await families.ask(family, 4) for family in range(FAMILIES)]
    assert all(answer.completion.usage.cached_tokens == PREFIX_TOKENS for answer in late), "found again"
