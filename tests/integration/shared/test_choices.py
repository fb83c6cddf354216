"""Several answers to one prompt on real engines: each that of its own seed, and the prompt prefilled once."""

import random

import pytest
from rachis import AsyncClient, token_prompt

from benchmarks.chaos_streams import KINDS, is_right
from tests.integration.conftest import all_blocks_free, until

pytestmark = pytest.mark.integration

_PROMPT_TOKENS = 200
_CHOICES = 3


@pytest.mark.parametrize("kind", ["seeded", "logprobs"])
async def test_each_choice_is_the_answer_that_its_seed_gives_alone(client: AsyncClient, kind: str) -> None:
    rng = random.Random(kind)
    prompt = token_prompt([rng.randrange(250) for _ in range(_PROMPT_TOKENS)])
    sampling = {**KINDS[kind], "max_tokens": 16, "seed": 11}

    choices = await client.generate_choices(prompt, _CHOICES, **sampling)

    for number, choice in enumerate(choices):
        alone = await client.generate(prompt, **{**sampling, "seed": 11 + number})
        assert is_right(choice, alone), number
    # All full blocks but what the last token of the prompt has to be computed with.
    cached = [choice.completion.usage.cached_tokens for choice in choices]
    assert cached[0] == 0
    assert all(_PROMPT_TOKENS - tokens <= 16 for tokens in cached[1:]), cached
    await until(lambda: all_blocks_free(client), "all blocks free")
