"""A scheduler of ours beside vLLM's, under the same traffic: every step has to be the same."""

import random
from typing import Any

from kv_transfer import vllm_private
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.campaign.fuzz.session_moves import Client
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine


def runner_view(output: Any, names_of_blocks: dict[int, int]) -> tuple[Any, ...]:
    """Everything of a scheduler output that a model runner acts on, blocks by the names given."""

    def named(groups: Any) -> Any:
        return None if groups is None else [[names_of_blocks[block] for block in group] for group in groups]

    cached = output.scheduled_cached_reqs
    return (
        [
            (new.req_id, new.prompt_token_ids, new.prefill_token_ids, named(new.block_ids), new.num_computed_tokens)
            for new in output.scheduled_new_reqs
        ],
        cached.req_ids,
        cached.resumed_req_ids,
        {name: list(tokens) for name, tokens in cached.all_token_ids.items()},
        [named(blocks) for blocks in cached.new_block_ids],
        (cached.num_computed_tokens, cached.num_output_tokens),
        list(output.num_scheduled_tokens.items()),
        output.preempted_req_ids,
        output.finished_req_ids,
    )


def names_by_free_order(engine: SimulatedEngine) -> dict[int, int]:
    """A pool's blocks in the order in which it will give them away; of an idle engine those are all."""
    free = vllm_private.pool_of(engine.scheduler).free_block_queue.get_all_free_blocks()
    return {block.block_id: index for index, block in enumerate(free)}


def play_the_same(engines: tuple[SimulatedEngine, SimulatedEngine], seed: int) -> int:
    """Drives both with one stream of plain requests and aborts, comparing every step. How many were preempted."""
    rng, world = random.Random(seed), engines[0].world
    client = Client(rng, longest=(world.blocks - 1) * BLOCK_SIZE - 40)
    names = [names_by_free_order(engine) for engine in engines]
    expected: dict[str, list[int]] = {}
    unfinished: list[str] = []
    preempted = 0
    for turn in range(3000):
        if turn < 300 and rng.random() < 0.25:
            name, prompt, max_tokens = f"r{turn}", client.prompt(), rng.choice((1, 2, 30))
            expected[name] = expected_tokens(prompt, max_tokens)
            unfinished.append(name)
            for engine in engines:
                engine.add(name, prompt, max_tokens)
        if turn >= 300 and not any(engine.scheduler.has_requests() for engine in engines):
            break
        if unfinished and rng.random() < 0.02:
            name = unfinished.pop(rng.randrange(len(unfinished)))
            expected.pop(name, None)
            for engine in engines:
                engine.abort(name)
        before = [len(engine.outputs) for engine in engines]
        turned = [engine.turn() for engine in engines]
        assert turned[0] == turned[1]
        steps = [engine.outputs[count:] for engine, count in zip(engines, before, strict=True)]
        assert [runner_view(step, names[0]) for step in steps[0]] == [runner_view(step, names[1]) for step in steps[1]]
        preempted += sum(len(step.preempted_req_ids or ()) for step in steps[0])
    assert not any(engine.scheduler.requests for engine in engines), "the traffic has not ended"
    assert engines[0].answers == engines[1].answers
    assert {name: engines[1].answers.get(name) for name in expected} == expected
    return preempted
