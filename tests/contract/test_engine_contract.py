"""What every engine promises, asked of the fake and of vLLM alike. The engines are shared, so each test cleans up."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster_configs.schema import RachisConfig
from cluster_core.engine import Engine
from cluster_core.engine_jobs import EmittedTokens, FinishReason, HandoffOutcome
from cluster_core.engine_reports import DecodeBatch, EngineInfo, EngineLoad, PrefixClaimChange, PrefixClaims
from cluster_core.errors import InvalidInputError, UnavailableError
from kv_transfer.claims.prefix_chunks import chunk_keys, root_key
from tests.contract.conftest import PROMPT, is_idle, make_job, outputs_of, text_of, tokens_of, until


async def test_a_job_ends_with_exactly_one_finish_reason_in_its_last_output(engine: Engine) -> None:
    outputs = await outputs_of(engine, make_job(5))

    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
async def test_a_job_generates_max_tokens_when_nothing_stops_it(engine: Engine, max_tokens: int) -> None:
    assert len(tokens_of(await outputs_of(engine, make_job(max_tokens)))) == max_tokens


async def test_the_same_greedy_job_twice_gives_the_same_tokens_and_text(engine: Engine) -> None:
    first, second = await outputs_of(engine, make_job(12)), await outputs_of(engine, make_job(12))

    assert tokens_of(first) == tokens_of(second)
    assert text_of(first) == text_of(second)


async def test_jobs_that_run_together_give_the_tokens_they_give_alone(engine: Engine) -> None:
    prompts = [PROMPT, PROMPT[:40], PROMPT[10:70]]
    alone = [tokens_of(await outputs_of(engine, make_job(10, prompt=prompt))) for prompt in prompts]
    together = await asyncio.gather(*(outputs_of(engine, make_job(10, prompt=prompt)) for prompt in prompts))

    assert [tokens_of(outputs) for outputs in together] == alone


async def test_a_stop_string_ends_the_text_before_it_with_reason_stop(engine: Engine) -> None:
    text = text_of(await outputs_of(engine, make_job(32)))
    stop = text[4:7]
    assert len(stop) == 3

    outputs = await outputs_of(engine, make_job(32, stop=(stop,)))

    assert outputs[-1].finish_reason is FinishReason.STOP
    assert text_of(outputs) == text[: text.index(stop)]


async def test_a_stop_token_ends_the_job_after_it_with_reason_stop(engine: Engine) -> None:
    tokens = tokens_of(await outputs_of(engine, make_job(16)))
    stop = tokens[3]

    outputs = await outputs_of(engine, make_job(16, stop_token_ids=(stop,)))

    assert outputs[-1].finish_reason is FinishReason.STOP
    assert tokens_of(outputs) == tokens[: tokens.index(stop) + 1]


@pytest.mark.usefixtures("computes")
@pytest.mark.parametrize("count", [0, 3])
async def test_logprobs_come_one_position_per_token_with_so_many_likeliest(engine: Engine, count: int) -> None:
    outputs = await outputs_of(engine, make_job(6, logprobs=count))

    positions = [position for output in outputs for position in output.logprobs]
    assert [position.sampled.token_id for position in positions] == tokens_of(outputs)
    assert all(len(position.top) == count for position in positions)
    assert all([entry.rank for entry in position.top] == list(range(1, count + 1)) for position in positions)
    assert all(position.sampled.rank == 1 and position.sampled.logprob <= 0 for position in positions)


async def test_no_logprobs_come_unasked(engine: Engine) -> None:
    outputs = await outputs_of(engine, make_job(4))
    assert all(output.logprobs == output.prompt_logprobs == () for output in outputs)


@pytest.mark.usefixtures("computes")
@pytest.mark.parametrize("count", [0, 3])
async def test_those_of_the_prompt_come_with_the_first_output_whatever_is_cached(engine: Engine, count: int) -> None:
    for _ in range(2):
        first, *others = await outputs_of(engine, make_job(3, prompt_logprobs=count))
        assert [row.sampled.token_id for row in first.prompt_logprobs] == list(PROMPT[1:])
        assert all(len(row.top) == count for row in first.prompt_logprobs)
        assert first.logprobs == ()
        assert all(output.prompt_logprobs == () for output in others)


@pytest.mark.usefixtures("computes")
async def test_an_answer_that_has_begun_says_nothing_of_its_prompt(engine: Engine) -> None:
    plain = await outputs_of(engine, make_job(6))
    so_far = EmittedTokens(tuple(tokens_of(plain)[:2]), 0)
    outputs = await outputs_of(engine, make_job(6, prompt_logprobs=2, emitted=so_far))
    assert tokens_of(outputs) == tokens_of(plain)[2:]
    assert all(output.prompt_logprobs == () for output in outputs)


async def test_closing_the_iterator_early_aborts_the_job_and_frees_its_blocks(engine: Engine) -> None:
    async with aclosing(engine.generate(make_job(2000))) as outputs:  # type: ignore[type-var]
        await anext(outputs)
        await until(engine, lambda load: load.running_requests == 1 and load.free_blocks < load.total_blocks)

    await until(engine, is_idle)


async def test_a_cancelled_consumer_aborts_its_job(engine: Engine) -> None:
    consumer = asyncio.create_task(outputs_of(engine, make_job(2000)))
    await until(engine, lambda load: load.running_requests == 1)

    consumer.cancel()

    with pytest.raises(asyncio.CancelledError):
        await consumer
    await until(engine, is_idle)


async def test_who_leaves_a_job_that_is_refused_leaves_the_one_of_its_name_alone(engine: Engine) -> None:
    job = make_job(60)
    async with aclosing(engine.generate(job)) as outputs:  # type: ignore[type-var]
        first = await anext(outputs)
        refused = asyncio.create_task(outputs_of(engine, job))
        await asyncio.sleep(0)
        refused.cancel()
        # It may have heard that it is refused.
        with pytest.raises((asyncio.CancelledError, InvalidInputError)):
            await refused
        assert len(tokens_of([first, *[output async for output in outputs]])) == 60


async def test_a_hand_off_job_ends_with_a_lease_that_holds_its_blocks_until_released(engine: Engine) -> None:
    outputs = await outputs_of(engine, make_job(1, hand_off=True))

    lease = outputs[-1].lease
    assert lease is not None
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    await until(engine, lambda load: load.leased_handoffs == 1 and load.running_requests == 0)
    assert engine.status().load.free_blocks < engine.status().load.total_blocks

    assert await engine.release(lease.lease_id) is True

    await until(engine, is_idle)


async def test_a_lease_is_released_once_only(engine: Engine) -> None:
    outputs = await outputs_of(engine, make_job(1, hand_off=True))
    lease = outputs[-1].lease
    assert lease is not None
    assert await engine.release(lease.lease_id) is True
    await until(engine, lambda load: load.leased_handoffs == 0)

    assert await engine.release(lease.lease_id) is False


async def test_a_hand_off_job_that_stops_leaves_no_lease(engine: Engine) -> None:
    [first] = tokens_of(await outputs_of(engine, make_job(1)))

    outputs = await outputs_of(engine, make_job(1, hand_off=True, stop_token_ids=(first,)))

    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].lease is None
    await until(engine, is_idle)


async def test_release_of_an_unknown_lease_is_false(engine: Engine) -> None:
    assert await engine.release("never-leased") is False


async def test_release_of_a_running_job_ends_it_as_unavailable(engine: Engine) -> None:
    job = make_job(2000)
    outputs = engine.generate(job)
    await anext(outputs)

    assert await engine.release(job.request_id) is True

    with pytest.raises(UnavailableError):
        async for _ in outputs:
            pass


async def test_a_prompt_beyond_the_models_length_is_refused_and_the_engine_keeps_serving(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    with pytest.raises(InvalidInputError):
        await outputs_of(engine, make_job(1, prompt=(97,) * (started[1].max_model_len + 1)))

    assert len(tokens_of(await outputs_of(engine, make_job(3)))) == 3


async def test_a_job_id_that_is_running_is_refused_and_the_first_job_goes_on(engine: Engine) -> None:
    job = make_job(400)
    async with aclosing(engine.generate(job)) as outputs:  # type: ignore[type-var]
        await anext(outputs)

        with pytest.raises(InvalidInputError, match="request_id"):
            await outputs_of(engine, job)

        assert (await anext(outputs)).token_ids


async def test_a_job_id_that_is_leased_is_refused_and_the_lease_stays_releasable(engine: Engine) -> None:
    job = make_job(1, hand_off=True)
    await outputs_of(engine, job)
    try:
        with pytest.raises(InvalidInputError, match="request_id"):
            await outputs_of(engine, job)
    finally:
        assert await engine.release(job.request_id) is True


async def test_a_job_without_a_pull_reports_no_hand_off(engine: Engine) -> None:
    outputs = await outputs_of(engine, make_job(2))

    assert all(output.handoff is None or output.handoff.outcome is HandoffOutcome.NONE for output in outputs)


async def test_counters_grow_by_what_a_job_took_and_gave(engine: Engine) -> None:
    await until(engine, lambda load: load.running_requests == 0)
    before = engine.status().counters
    requests, prompt, generated = before.requests, before.prompt_tokens, before.generated_tokens

    await outputs_of(engine, make_job(7))
    await engine.release("nothing")

    after = engine.status().counters
    assert after.requests - requests == 1
    assert after.prompt_tokens - prompt == len(PROMPT)
    assert after.generated_tokens - generated == 7


async def test_a_repeated_prompt_is_found_in_the_tiers_and_listed_as_hot(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    block_size = started[1].block_size_tokens
    prompt = tuple(token % 251 for token in range(7, 207))
    before = engine.status().tiers
    if before is None:
        pytest.skip("it keeps no tiers")
    # Of other tests: one may be as long as ours.
    earlier = {each.hash for each in await engine.hottest_prefixes(1000)}

    for _ in range(2):
        await outputs_of(engine, make_job(1, prompt=prompt))

    def is_counted(_load: EngineLoad) -> bool:
        tiers = engine.status().tiers
        return tiers is not None and tiers.prompt_tokens - before.prompt_tokens == 2 * len(prompt)

    await until(engine, is_counted)
    after = engine.status().tiers
    assert after is not None
    hits = after.device_hit_tokens + after.host_hit_tokens - before.device_hit_tokens - before.host_hit_tokens
    assert hits == (len(prompt) - 1) // block_size * block_size
    assert after.device_capacity_blocks >= after.device_blocks >= len(prompt) // block_size

    hottest = await engine.hottest_prefixes(1000)
    assert [each.priority for each in hottest] == sorted((each.priority for each in hottest), reverse=True)
    [ours] = [each for each in hottest if each.hash not in earlier]
    assert ours.tokens == len(prompt) // block_size * block_size
    assert (ours.frequency, ours.device_blocks) == (2, len(prompt) // block_size)
    assert len(await engine.hottest_prefixes(1)) == 1


async def test_cached_chunks_are_told_by_the_keys_that_everybody_finds(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    chunk_tokens = RachisConfig().index.chunk_tokens
    assert chunk_tokens % started[1].block_size_tokens == 0
    prompt = tuple(token % 241 for token in range(11, 11 + 2 * chunk_tokens + 40))
    believed: tuple[set[int], set[int]] = (set(), set())

    engine.follow_claims(lambda change: believe(believed, change))
    for job in (make_job(1, prompt=prompt), replace(make_job(1, prompt=prompt), cache_salt="tenant")):
        await outputs_of(engine, job)

    expected = {key for salt in ("", "tenant") for key in chunk_keys(prompt, root_key("", salt), chunk_tokens).tolist()}
    assert len(expected) == 4
    claims = await engine.prefix_claims()
    assert expected <= claims.device
    assert PrefixClaims(*map(frozenset, believed)) == claims


async def test_a_follower_hears_first_what_is_there_already(engine: Engine) -> None:
    prompt = tuple(token % 239 for token in range(5, 305))
    await outputs_of(engine, make_job(1, prompt=prompt))
    believed: tuple[set[int], set[int]] = (set(), set())

    engine.follow_claims(lambda change: believe(believed, change))

    assert (
        set(chunk_keys(prompt, root_key("", ""), RachisConfig().index.chunk_tokens).tolist())
        <= (await engine.prefix_claims()).device
    )
    assert believed[0]


async def test_a_look_at_the_pools_has_its_place_among_the_changes(engine: Engine) -> None:
    """What was believed at that place is what the pools held, whatever runs meanwhile."""
    believed: tuple[set[int], set[int]] = (set(), set())
    engine.follow_claims(lambda change: believe(believed, change))
    at_look: list[PrefixClaims] = []
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(250) for _ in range(300)) for _ in range(6)]

    running = [asyncio.create_task(outputs_of(engine, make_job(3, prompt=prompt))) for prompt in prompts]
    for _ in range(5):
        claims = await engine.prefix_claims(lambda: at_look.append(PrefixClaims(*map(frozenset, believed))))
        assert at_look[-1] == claims
    await asyncio.gather(*running)


async def test_costs_and_stored_blocks_are_known_once_there_was_work(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    before = engine.status().counters
    requests, blocks = before.cacheable_requests, before.stored_blocks
    prompt = tuple(token % 233 for token in range(3, 303))
    await outputs_of(engine, make_job(5, prompt=prompt))
    # The same once more brings nothing that was not there.
    await outputs_of(engine, make_job(1, prompt=prompt))
    await engine.release("nothing")
    await engine.release("nothing")

    status = engine.status()
    # On a busy machine the coefficients cannot always be told apart; their sum can.
    costs = status.costs
    assert costs.prefill_s + 300 * costs.prefill_s_per_token + 300 * 300 * costs.prefill_s_per_pair > 0
    assert status.costs.decode_step_s > 0
    assert status.counters.cacheable_requests - requests == 1
    assert status.counters.stored_blocks - blocks >= 300 // started[1].block_size_tokens


@pytest.mark.parametrize("max_tokens", [1, 80])
async def test_a_request_that_comes_again_counts_as_nothing_new(
    started: tuple[Engine, EngineInfo], engine: Engine, max_tokens: int
) -> None:
    """Of a prompt of whole blocks vLLM computes the last one again; what it generates it has cached as well."""
    prompt = tuple(token % 231 for token in range(7, 7 + 4 * started[1].block_size_tokens))
    await outputs_of(engine, make_job(max_tokens, prompt=prompt))
    await engine.release("nothing")
    before = engine.status().counters
    requests, blocks = before.cacheable_requests, before.stored_blocks

    await outputs_of(engine, make_job(max_tokens, prompt=prompt))
    await engine.release("nothing")

    after = engine.status().counters
    assert (after.cacheable_requests, after.stored_blocks) == (requests, blocks)


def believe(believed: tuple[set[int], set[int]], change: PrefixClaimChange) -> None:
    for claims, states in zip(believed, (change.device, change.host), strict=True):
        claims -= {key for key, comes in states.items() if not comes}
        claims |= {key for key, comes in states.items() if comes}


async def test_an_engine_that_does_not_form_its_batch_by_prefixes_tells_nothing_of_it(
    engine: Engine, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["started"] == "shared":
        pytest.skip("an engine that does both forms one")
    assert engine.status().decode is None
    assert await engine.decode_batch(100) == DecodeBatch()
