"""Prompts of a few families that share a long prefix each, and whether what the index says of them is true."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from rachis import AsyncClient, Generated, token_prompt
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from tests.integration.conftest import CHUNK_TOKENS

PREFIX_CHUNKS = 20
PREFIX_TOKENS = PREFIX_CHUNKS * CHUNK_TOKENS
FAMILIES = 5
_FIRST_FAMILY = itertools.count(0, 20)


@dataclass
class Families:
    """What was answered to each prompt; nobody else asks for prompts of these families."""

    client: AsyncClient
    first: int = field(default_factory=lambda: next(_FIRST_FAMILY))
    answers: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    async def ask(
        self, family: int, closing: int, cache_salt: str = "", client: AsyncClient | None = None
    ) -> Generated:
        """Greedy in float32: whoever answers, the same prompt has the same answer. client: another way to ask."""
        prompt = (*_tokens(self.first + family, PREFIX_TOKENS), *_tokens(1000 + closing, 20))
        answer = await (client or self.client).generate(
            token_prompt(prompt), temperature=0.0, max_tokens=6, ignore_eos=True, cache_salt=cache_salt
        )
        expected = self.answers.setdefault(prompt, tuple(answer.token_ids))
        assert tuple(answer.token_ids) == expected, f"a wrong token: family {family}, closing {closing}"
        return answer


async def checked_index(client: AsyncClient, workers: int) -> Sequence[admin.WorkerCheck]:
    """A check in which so many workers had their say: on a busy machine one may not get to it in its two seconds, or
    not to its registration."""
    async with asyncio.timeout(60):
        while True:
            checked = (await client.admin.CheckIndex(admin.CheckIndexRequest())).workers
            if len(checked) == workers and not any(check.error for check in checked):
                return checked


async def claims_are_true(client: AsyncClient, workers: int, *, at_least: int) -> Sequence[admin.WorkerCheck]:
    """The index against the engines' own block pools."""
    checked = await checked_index(client, workers)
    for check in checked:
        assert check.index_generation == check.generation, check
        for tier in (check.device, check.host):
            assert (tier.untrue, tier.missing) == (0, 0), check
    assert sum(check.device.agreed for check in checked if check.pool == wire.POOL_PREFILL) >= at_least
    return checked


def _tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(250), k=count))
