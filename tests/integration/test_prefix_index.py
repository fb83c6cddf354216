"""The prefix index on a real cluster of two by two: what it says is true, whatever happens to the workers."""

import asyncio
import functools
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from control_plane.client import Generated, RachisClient, token_prompt
from tests.integration.conftest import own_service, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CHUNK = 64
PREFIX_TOKENS = 20 * CHUNK
FAMILIES = 5
_FIRST_FAMILY = itertools.count(0, 20)
TWO_BY_TWO = {
    "pools__prefill__workers": 2,
    "pools__prefill__cpus_per_worker": 0.25,
    "pools__decode__workers": 2,
    "pools__decode__cpus_per_worker": 0.25,
    "index__chunk_tokens": CHUNK,
}


@dataclass
class Asked:
    """Prompts of a few families that share a long prefix each, and what was answered to each prompt."""

    client: RachisClient
    first_family: int
    answers: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    async def ask(self, family: int, closing: int, cache_salt: str = "") -> Generated:
        """Greedy in float32: whoever answers, the same prompt has the same answer."""
        prompt = (*_tokens(self.first_family + family, PREFIX_TOKENS), *_tokens(1000 + closing, 20))
        answer = await self.client.generate(
            token_prompt(prompt), temperature=0.0, max_tokens=6, ignore_eos=True, cache_salt=cache_salt
        )
        expected = self.answers.setdefault(prompt, tuple(answer.token_ids))
        assert tuple(answer.token_ids) == expected, f"a wrong token: family {family}, closing {closing}"
        return answer


@pytest_asyncio.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RachisClient]:
    async with own_service(tmp_path_factory.mktemp("two-by-two"), **TWO_BY_TWO) as (_, client):
        yield client


@pytest.fixture
def asked(service: RachisClient) -> Asked:
    """Each test has families of its own."""
    return Asked(service, next(_FIRST_FAMILY))


async def test_prefixes_are_prefilled_once_and_found_again_and_claims_stay_true(asked: Asked) -> None:
    first = [await asked.ask(family, 0) for family in range(FAMILIES)]
    placed = {family: answer.completion.route.prefill_worker_id for family, answer in enumerate(first)}
    assert set(placed.values()) == {"prefill-0", "prefill-1"}, "both get something of what nobody has"
    assert all(answer.completion.usage.cached_tokens == 0 for answer in first)

    again = [(family, await asked.ask(family, closing)) for closing in (1, 2, 3) for family in range(FAMILIES)]

    for family, answer in again:
        assert answer.completion.route.prefill_worker_id == placed[family], "it goes where its prefix is"
        assert answer.completion.usage.cached_tokens == PREFIX_TOKENS, "and computes none of it"
    await _claims_are_true(asked.client, at_least=FAMILIES * (PREFIX_TOKENS // CHUNK))


async def test_another_tenant_s_prompt_finds_nothing(asked: Asked) -> None:
    await asked.ask(0, 0, cache_salt="one")
    mine = await asked.ask(0, 1, cache_salt="one")
    other = await asked.ask(0, 2, cache_salt="two")
    assert mine.completion.usage.cached_tokens == PREFIX_TOKENS
    assert other.completion.usage.cached_tokens == 0
    await _claims_are_true(asked.client, at_least=2 * (PREFIX_TOKENS // CHUNK))


async def test_a_burst_of_siblings_is_computed_once(asked: Asked) -> None:
    """They are placed before any worker has told of a block."""
    answers = await asyncio.gather(*(asked.ask(7, closing) for closing in range(6)))
    workers = Counter(answer.completion.route.prefill_worker_id for answer in answers)
    assert len(workers) == 1, workers
    assert sum(answer.completion.usage.cached_tokens for answer in answers) >= 4 * PREFIX_TOKENS


async def test_a_killed_worker_s_claims_are_void_and_those_of_its_next_start_are_true(asked: Asked) -> None:
    for closing in (0, 1):
        for family in range(FAMILIES):
            await asked.ask(family, closing)
    await _claims_are_true(asked.client, at_least=1)

    for worker_id in ("prefill-0", "decode-1"):
        pid, number = await _worker(asked.client, worker_id)
        os.kill(pid, signal.SIGKILL)
        for family in range(FAMILIES):
            await asked.ask(family, 2)
        back = functools.partial(_came_back, asked.client, worker_id, number)
        await until(back, f"{worker_id} is back", timeout_s=120)
        await _claims_are_true(asked.client, at_least=1)
        for closing in (0, 3):
            for family in range(FAMILIES):
                await asked.ask(family, closing)
        await _claims_are_true(asked.client, at_least=FAMILIES * (PREFIX_TOKENS // CHUNK))

    late = [await asked.ask(family, 4) for family in range(FAMILIES)]
    assert all(answer.completion.usage.cached_tokens == PREFIX_TOKENS for answer in late), "found again"


async def test_under_eviction_the_index_stays_in_step_with_the_pools(tmp_path: Path) -> None:
    """Device and host memory hold a part of what is asked for; workers are killed meanwhile."""
    small = {"engine__kv_blocks": 128, "tiers__host_gib": 0.02, "engine__max_model_len": 2048}
    async with own_service(tmp_path, **TWO_BY_TWO, **small) as (_, client):
        asked = Asked(client, next(_FIRST_FAMILY))
        rng = random.Random(6)
        for turn in range(2):
            questions = [(rng.randrange(12), rng.randrange(4)) for _ in range(32)]
            for start in range(0, len(questions), 4):
                await asyncio.gather(*(asked.ask(*each) for each in questions[start : start + 4]))
            checked = await _claims_are_true(client, at_least=1)
            held = sum(check.device.agreed + check.host.agreed for check in checked)
            assert held < 12 * 4 * (PREFIX_TOKENS // CHUNK), "not all of it fits"
            if turn == 0:
                pid, number = await _worker(client, "prefill-1")
                os.kill(pid, signal.SIGKILL)
                await until(functools.partial(_came_back, client, "prefill-1", number), "it is back", timeout_s=120)


async def test_without_a_choice_of_way_short_remainders_stay_on_the_decode_worker(tmp_path: Path) -> None:
    async with own_service(tmp_path, index__chunk_tokens=CHUNK, placement__disaggregation="conditional") as (_, client):
        asked = Asked(client, next(_FIRST_FAMILY))
        long = await asked.ask(0, 0)
        assert long.completion.route.prefill_worker_id, "1,300 tokens are too many for a decode worker"
        short = [await asked.ask(0, closing) for closing in range(1, 4)]
        for answer in short:
            assert answer.completion.route.prefill_worker_id == ""
            assert answer.completion.route.decode_worker_id == long.completion.route.decode_worker_id
            assert answer.completion.route.handoff == generation.HANDOFF_OUTCOME_NONE
            assert answer.completion.usage.cached_tokens == PREFIX_TOKENS


async def _claims_are_true(client: RachisClient, *, at_least: int) -> Sequence[admin.WorkerCheck]:
    """The index against the engines' own block pools."""
    checked = (await client.admin.CheckIndex(admin.CheckIndexRequest())).workers
    assert len(checked) == 4
    for check in checked:
        assert not check.error, check
        assert check.index_generation == check.generation, check
        for tier in (check.device, check.host):
            assert (tier.untrue, tier.missing) == (0, 0), check
    assert sum(check.device.agreed for check in checked if check.pool == wire.POOL_PREFILL) >= at_least
    return checked


async def _worker(client: RachisClient, worker_id: str) -> tuple[int, int]:
    for view in await client.workers():
        if view.registration.worker_id == worker_id:
            return view.registration.pid, view.registration.generation
    raise AssertionError(f"{worker_id} is not there")


async def _came_back(client: RachisClient, worker_id: str, number: int) -> bool:
    return any(
        view.registration.worker_id == worker_id
        and view.registration.generation > number
        and view.registration.state == wire.WORKER_STATE_READY
        for view in await client.workers()
    )


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(250), k=count))
