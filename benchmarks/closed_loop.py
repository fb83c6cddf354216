"""Prompts to one engine, so many at a time, the next when one has ended; first tokens are timed."""

from asyncio import TaskGroup
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster_core.clock import monotonic_s
from cluster_core.engine import Engine
from cluster_core.engine_jobs import EngineJob, SamplingSpec
from cluster_core.errors import UnavailableError, Ungrouped


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy completion."""

    # From sending the prompt.
    ttft_ms: float
    prompt_tokens: int
    # Of the prompt, not computed.
    cached_tokens: int
    tokens: tuple[int, ...]


async def closed_loop(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    answer_tokens: int,
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """In the order of the prompts. Raises what the engine raises."""
    sampling = SamplingSpec(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(prompts))

    async def one_after_the_other() -> None:
        for index, prompt in waiting:
            answers[index] = await _answer(engine, EngineJob(f"loop-{index}", prompt, sampling))
            on_done()

    with Ungrouped():
        async with TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_after_the_other())
    return [answers[index] for index in range(len(prompts))]


async def _answer(engine: Engine, job: EngineJob) -> Answer:
    sent_s = monotonic_s()
    ttft_ms, cached_tokens, tokens = 0.0, 0, list[int]()
    async for output in engine.generate(job):
        if not tokens:
            ttft_ms = (monotonic_s() - sent_s) * 1000
            # Told with the first output only.
            cached_tokens = output.cached_tokens
        tokens += output.token_ids
    if not tokens:
        raise UnavailableError("a request ended without a token")
    return Answer(ttft_ms, len(job.token_ids), cached_tokens, tuple(tokens))
