"""The prompts of the test, what one plain vLLM answers to them, and a stream of them under faults.

Greedy and in fp32, so that the tokens have to be equal whatever way a request goes.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from rachis import AsyncClient, Generated, token_prompt
from rachis.conventions import RETRY_AFTER

from benchmarks.direct_call import DirectWorker
from benchmarks.plain_engine import GENERATION, plain_engine
from cluster_configs.schema import RachisConfig

logger = logging.getLogger(__name__)

Prompt = tuple[int, ...]
Answers = Mapping[Prompt, list[int]]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
_AT_ONCE = 8
# A stream has begun once so many were answered.
_FIRST_ANSWERS = 4
_TIMEOUT_S = 60.0


def make_prompts(count: int, seed: int) -> list[Prompt]:
    """Distinct prompts of 200 to 500 tokens."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(250) for _ in range(rng.randint(200, 500))) for _ in range(count)]


async def plain_answers(prompts: Sequence[Prompt], config: RachisConfig) -> Answers:
    """What one plain vLLM with this configuration's engine answers."""
    async with plain_engine(config) as (address, _):
        plain = DirectWorker(address, GENERATION)
        places = asyncio.Semaphore(_AT_ONCE)

        async def answer(prompt: Prompt) -> tuple[Prompt, list[int]]:
            async with places:
                return prompt, (await plain.decode(list(prompt), GREEDY)).token_ids

        answers = dict(await asyncio.gather(*map(answer, prompts)))
        await plain.close()
    logger.info("plain vLLM has answered %d prompts", len(answers))
    return answers


async def generate(client: AsyncClient, prompt: Prompt) -> Generated:
    return await client.generate(token_prompt(prompt), timeout_s=_TIMEOUT_S, **GREEDY)


@dataclass(slots=True)
class Stream:
    """Requests that were sent while something was done to the cluster, and what came of them."""

    answered: list[tuple[Prompt, Generated]] = field(default_factory=list)
    refused: list[grpc.aio.AioRpcError] = field(default_factory=list)
    # Requests that were neither answered nor refused before their own deadline.
    expired: list[Prompt] = field(default_factory=list)

    async def has_begun(self) -> bool:
        return len(self.answered) >= _FIRST_ANSWERS

    def by_decode_pool(self) -> int:
        """How many were prefilled by a decode worker."""
        return sum(not generated.completion.route.prefill_worker_id for _, generated in self.answered)

    def wrong(self, answers: Answers) -> list[Prompt]:
        """Prompts whose tokens are not those of plain vLLM."""
        return [prompt for prompt, generated in self.answered if generated.token_ids != answers[prompt]]

    def refused_badly(self) -> list[str]:
        """Refusals that are not UNAVAILABLE, or do not say when to try again."""
        return [
            f"{error.code()}: {error.details()}"
            for error in self.refused
            if error.code() is not grpc.StatusCode.UNAVAILABLE
            or RETRY_AFTER not in dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
        ]


@asynccontextmanager
async def requests_meanwhile(
    client: AsyncClient, prompts: Sequence[Prompt], interval_s: float = 0.3
) -> AsyncIterator[Stream]:
    """Sends the prompts one after the other, without waiting for answers; all of them have ended after the block."""
    stream = Stream()
    over = asyncio.Event()

    async def send(prompt: Prompt) -> None:
        try:
            stream.answered.append((prompt, await generate(client, prompt)))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                stream.expired.append(prompt)
            else:
                stream.refused.append(error)

    async def send_all() -> None:
        async with asyncio.TaskGroup() as sent:
            for prompt in itertools.cycle(prompts):
                if over.is_set():
                    return
                sent.create_task(send(prompt))
                await asyncio.sleep(interval_s)

    async with asyncio.TaskGroup() as group:
        group.create_task(send_all())
        try:
            yield stream
        finally:
            over.set()
    counts = len(stream.answered), len(stream.refused), len(stream.expired)
    logger.info("requests meanwhile: %d answered, %d refused, %d expired", *counts)
