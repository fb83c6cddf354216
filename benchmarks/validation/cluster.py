"""A running cluster, loaded and timed as its clients see it.

What the simulator is told of it (`Measured`) is taken at no load, at full decode batches, and with both workers busy at
once: nothing is taken from the workloads that it then has to predict.
"""

import asyncio
import random
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rachis import AsyncClient, token_prompt
from rachis.client import Piece
from rachis.v1 import generation_pb2 as generation

from cluster_core.clock import monotonic_s
from cluster_core.errors import UnavailableError, Ungrouped

# Before anything counts: Ray and the engines are still busy with themselves when the service is up.
WARM_UP, WARM_UP_TOKENS = 30, 128
PROMPT_SIZES = (32, 256, 1024, 2048, 3500)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 600)
REPETITIONS = 7
_ANSWER_TOKENS = 8
# Long enough that a whole batch decodes together after its prompts were prefilled one by one.
_BATCH_ANSWER_TOKENS, _ANSWER_TOKENS_PER_REQUEST = 128, 8
_CONTENTION_BATCH, _CONTENTION_PROMPT = 8, 1024
_CONTENTION_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Prompt:
    """Sent so many seconds after the first one."""

    at_s: float
    token_ids: tuple[int, ...]
    output_tokens: int
    # Of a session: what of the prompt comes how many seconds later. The first opens it, the last makes it whole.
    pieces: tuple[tuple[float, tuple[int, ...]], ...] = ()


@dataclass(slots=True)
class Timed:
    """One request as its client saw it."""

    # Since the run began; of a session, when its prompt was whole.
    sent_s: float
    prompt_tokens: int
    # When each token came, since the run began.
    token_s: list[float] = field(default_factory=list)
    # Of the engine, from its first step of the prompt to the first token.
    prefill_s: float = 0.0
    # Of the prompt, found in a cache where it was prefilled.
    cached_tokens: int = 0
    # The workers that prefilled and decoded it.
    workers: tuple[str, str] = ("", "")
    # Of a session, when it was opened.
    opened_s: float | None = None

    @property
    def arrived_s(self) -> float:
        return self.sent_s if self.opened_s is None else self.opened_s

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def end_s(self) -> float:
        return self.token_s[-1]

    @property
    def gap_s(self) -> float:
        """From the first token, of the prefill worker, to the second, of the decode worker."""
        return self.token_s[1] - self.token_s[0]


@dataclass(frozen=True, slots=True)
class PromptPoint:
    """Medians of one prompt length at no load."""

    tokens: int
    # The engine's part.
    prefill_s: float
    # The first token as the client sees it.
    ttft_s: float
    # From the first token to the second one.
    gap_s: float


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """A decode step of so many requests whose contexts have so many tokens together."""

    batch: int
    context_tokens: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What the simulator knows of the cluster."""

    prompts: tuple[PromptPoint, ...]
    batches: tuple[BatchPoint, ...]
    # How many times longer steps take while the other worker is busy as well.
    prefill_slowdown: float
    decode_slowdown: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Cluster:
    """Sends prompts; `on_done` is told of each that has ended."""

    def __init__(self, client: AsyncClient, vocabulary_size: int, seed: int, on_done: Callable[[], None]) -> None:
        self._client = client
        self._vocabulary_size = vocabulary_size
        self._rng = random.Random(f"validation/{seed}")
        self._on_done = on_done

    def fresh(self, tokens: int) -> tuple[int, ...]:
        """A prompt that nobody has seen."""
        return tuple(self._rng.randrange(self._vocabulary_size) for _ in range(tokens))

    async def run(self, prompts: Sequence[Prompt]) -> list[Timed]:
        """At their times, whatever has become of those before. Raises UnavailableError where one fails."""
        began_s = monotonic_s()

        async def at_its_time(prompt: Prompt) -> Timed:
            await _until(began_s + prompt.at_s)
            return await self._send(prompt, began_s)

        with Ungrouped():
            async with TaskGroup() as group:
                tasks = [group.create_task(at_its_time(prompt)) for prompt in prompts]
        return [task.result() for task in tasks]

    async def measure(self) -> Measured:
        await self.warm_up()
        points = await self.prompt_points()
        batches = []
        for context in CONTEXTS:
            for batch in BATCHES:
                batches.append(await self._batch_point(batch, context))
        slowdowns = [await self._slowdowns() for _ in range(_CONTENTION_ROUNDS)]
        return Measured(
            tuple(points),
            tuple(batches),
            max(1.0, median(prefill for prefill, _ in slowdowns)),
            max(1.0, median(decode for _, decode in slowdowns)),
        )

    async def warm_up(self) -> None:
        for _ in range(WARM_UP):
            await self._alone(WARM_UP_TOKENS, _ANSWER_TOKENS)

    async def prompt_points(self, repetitions: int = REPETITIONS) -> list[PromptPoint]:
        """Of fresh prompts, one at a time.

        In a new random order each time, so that a disturbance of the machine does not hit one size alone.
        """
        timed: dict[int, list[Timed]] = {size: [] for size in PROMPT_SIZES}
        for _ in range(repetitions):
            for size in self._rng.sample(PROMPT_SIZES, len(PROMPT_SIZES)):
                timed[size].append(await self._alone(size, _ANSWER_TOKENS))
        return [
            PromptPoint(
                size,
                median(each.prefill_s for each in runs),
                median(each.ttft_s for each in runs),
                median(each.gap_s for each in runs),
            )
            for size, runs in timed.items()
        ]

    async def _batch_point(self, batch: int, context: int) -> BatchPoint:
        answer_tokens = max(_BATCH_ANSWER_TOKENS, batch * _ANSWER_TOKENS_PER_REQUEST)
        together = [Prompt(0.0, self.fresh(context), answer_tokens) for _ in range(batch)]
        timed = await self.run(together)
        step_s, tokens = _together(timed)
        return BatchPoint(batch, batch * (context + tokens), step_s)

    async def _slowdowns(self) -> tuple[float, float]:
        """(prefill, decode): one prompt after the other beside a decode batch, against each without the other."""
        alone_s = [(await self._alone(_CONTENTION_PROMPT, 1)).prefill_s for _ in range(REPETITIONS)]
        batch = [Prompt(0.0, self.fresh(64), 3 * _BATCH_ANSWER_TOKENS) for _ in range(_CONTENTION_BATCH)]
        quiet_s, _ = _together(await self.run(batch))
        beside: list[tuple[float, Timed]] = []
        began_s = monotonic_s()
        decoding = asyncio.ensure_future(self.run([Prompt(0.0, self.fresh(64), each.output_tokens) for each in batch]))
        while not decoding.done():
            beside.append((monotonic_s() - began_s, await self._alone(_CONTENTION_PROMPT, 1)))
        timed = await decoding
        first_s, last_s = max(each.token_s[1] for each in timed), min(each.end_s for each in timed)
        within = [
            each.prefill_s for at_s, each in beside if first_s <= at_s and at_s + each.end_s - each.sent_s <= last_s
        ]
        if not within:
            raise UnavailableError("no prompt was prefilled while a batch decoded: the machine is too busy")
        busy_s, _ = _together(timed)
        return median(within) / median(alone_s), busy_s / quiet_s

    async def _alone(self, tokens: int, output_tokens: int) -> Timed:
        return await self._send(Prompt(0.0, self.fresh(tokens), output_tokens), monotonic_s())

    async def _send(self, prompt: Prompt, began_s: float) -> Timed:
        timed = Timed(monotonic_s() - began_s, len(prompt.token_ids))
        wishes = {"max_tokens": prompt.output_tokens, "temperature": 0.0, "ignore_eos": True}
        if prompt.pieces:
            answer = self._in_pieces(prompt, timed, began_s, wishes)
        else:
            answer = self._client.stream(token_prompt(list(prompt.token_ids)), **wishes)
        async with aclosing(answer) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if isinstance(piece, generation.Completion):
                    timed.prefill_s = piece.timings.prefill_ms / 1000
                    timed.cached_tokens = piece.usage.cached_tokens
                    timed.workers = piece.route.prefill_worker_id, piece.route.decode_worker_id
                else:
                    timed.token_s += [monotonic_s() - began_s] * len(piece.token_ids)
        self._on_done()
        if len(timed.token_s) != prompt.output_tokens:
            raise UnavailableError(f"a request ended with {len(timed.token_s)} of {prompt.output_tokens} tokens")
        return timed

    async def _in_pieces(
        self, prompt: Prompt, timed: Timed, began_s: float, wishes: dict[str, Any]
    ) -> AsyncIterator[Piece]:
        """As a session. Sets in `timed` when it was opened, and when its prompt was whole."""
        opened_s = monotonic_s()
        timed.opened_s = opened_s - began_s
        (_, prefix), *following, (whole_after_s, closing) = prompt.pieces
        async with self._client.session(token_prompt(list(prefix)), **wishes) as session:
            for after_s, tokens in following:
                await _until(opened_s + after_s)
                await session.append(list(tokens))
            await _until(opened_s + whole_after_s)
            timed.sent_s = monotonic_s() - began_s
            async for delta in session.finish(token_prompt(list(closing))):
                yield delta
            yield session.completion


async def _until(moment_s: float) -> None:
    await asyncio.sleep(max(0.0, moment_s - monotonic_s()))


def _together(timed: Sequence[Timed]) -> tuple[float, int]:
    """(seconds of a step while all of them decode, tokens that each has got by the middle of that time)."""
    first_s, last_s = max(each.token_s[1] for each in timed), min(each.end_s for each in timed)
    tokens = [sum(first_s < at_s <= last_s for at_s in each.token_s) for each in timed]
    steps = median(tokens)
    if last_s <= first_s or not steps:
        raise UnavailableError("a batch never decoded together: the machine is too busy")
    before = median(sum(at_s <= first_s for at_s in each.token_s) for each in timed)
    return (last_s - first_s) / steps, round(before + steps / 2)
