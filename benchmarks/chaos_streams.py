"""The clients of a run of `rachis chaos`: streams that are always open, plain requests and sessions, whose answers are
compared with those of plain vLLM, tokens, text and log-probabilities."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
from rachis import AsyncClient, Generated, token_prompt
from rachis.session import RefusedError

from cluster_core.clock import monotonic_s

# What requests ask for, besides their length.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {
        "temperature": 1.0,
        "top_p": 0.95,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
    },
    "stops": {"temperature": 0.0, "ignore_eos": True, "min_tokens": 4},
    "logprobs": {"temperature": 0.0, "ignore_eos": True, "logprobs": 2},
}
# Of one request; who has no end so long after it never gets one.
DEADLINE_S = 60.0
_GRACE_S = 30.0
_MOST_TRIES = 5
_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, what is asked for, and what plain vLLM answers. choices: with this seed, with the next one, and so on;
    of greedy sampling there is one."""

    token_ids: tuple[int, ...]
    sampling: Mapping[str, Any]
    choices: Sequence[Generated]

    @property
    def expected(self) -> Generated:
        return self.choices[0]


@dataclass(slots=True)
class Tally:
    """first_try: requests that completed without being sent again. tokens_twice: of those that are wrong, answers that
    repeat a part of themselves. migrations: of answers that completed. resumes: of answers that had begun when their
    router was lost. pauses_s: the longest of each that completed, between two of its pieces, or from the request to its
    first."""

    requests: int = 0
    first_try: int = 0
    completed: int = 0
    application_retries: int = 0
    wrong: int = 0
    tokens_twice: int = 0
    migrations: int = 0
    resumes: int = 0
    unended: int = 0
    pauses_s: list[float] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Try:
    choices: Sequence[Generated]
    # By choice.
    last_s: list[float]
    pause_s: float = 0.0
    status: str = ""
    sentence: str = ""

    def take(self, choice: int, piece: Any) -> None:
        now_s = monotonic_s()
        self.pause_s, self.last_s[choice] = max(self.pause_s, now_s - self.last_s[choice]), now_s
        if hasattr(piece, "route"):
            self.choices[choice].completion.CopyFrom(piece)
        else:
            self.choices[choice].add(piece)


class Streams:
    """`run` until cancelled. address: of all the routers."""

    def __init__(self, cases: Sequence[Case], address: str, seed: int) -> None:
        self._cases = cases
        self._address = address
        self._rng = random.Random(seed)
        self.tally = Tally()
        self.stopping = False

    async def run(self, streams: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(streams):
                tasks.create_task(self._stream())

    async def _stream(self) -> None:
        async with AsyncClient(self._address) as client:
            while not self.stopping:
                case, is_session = self._rng.choice(self._cases), self._rng.random() < 0.4
                n = self._rng.randint(1, len(case.choices)) if not is_session else 1
                await self._request(client, case, n, is_session=is_session)
            self.tally.resumes += client.resumes

    async def _request(self, client: AsyncClient, case: Case, n: int, *, is_session: bool) -> None:
        tally = self.tally
        tally.requests += 1
        for number in range(_MOST_TRIES):
            tried = await self._try(client, case, n, is_session=is_session)
            expected = case.choices[:n]
            if not tried.status:
                tally.first_try += number == 0
                tally.completed += 1
                for got, right in zip(tried.choices, expected, strict=True):
                    if not is_right(got, right):
                        tally.wrong += 1
                        tally.tokens_twice += repeats(got.token_ids, right.token_ids)
                tally.migrations += sum(got.completion.route.migrations for got in tried.choices)
                tally.pauses_s.append(tried.pause_s)
                return
            tally.statuses[tried.status] = tally.statuses.get(tried.status, 0) + 1
            tokens = sum(len(got.token_ids) for got in tried.choices)
            tally.sentences.append(f"{tried.status} after {tokens} tokens: {tried.sentence}")
            # What came of an answer that broke off has to be right as well.
            tally.wrong += any(
                got.token_ids != right.token_ids[: len(got.token_ids)]
                for got, right in zip(tried.choices, expected, strict=True)
            )
            tally.application_retries += 1
            await asyncio.sleep(_RETRY_S)

    async def _try(self, client: AsyncClient, case: Case, n: int, *, is_session: bool) -> _Try:
        tried = _Try([Generated() for _ in range(n)], [monotonic_s()] * n)
        try:
            async with asyncio.timeout(DEADLINE_S + _GRACE_S):
                pieces = self._session(client, case) if is_session else self._plain(client, case, n)
                async with aclosing(pieces) as answer:  # type: ignore[type-var]
                    async for choice, piece in answer:
                        tried.take(choice, piece)
        except grpc.aio.AioRpcError as error:
            tried.status, tried.sentence = error.code().name, str(error.details())
        except RefusedError as error:
            tried.status, tried.sentence = error.status, str(error)
        except TimeoutError:
            tried.status = "UNENDED"
            self.tally.unended += 1
        return tried

    async def _plain(self, client: AsyncClient, case: Case, n: int) -> AsyncIterator[tuple[int, Any]]:
        prompt = token_prompt(case.token_ids)
        async for item in client.stream_choices(prompt, n, timeout_s=DEADLINE_S, **case.sampling):
            yield item

    async def _session(self, client: AsyncClient, case: Case) -> AsyncIterator[tuple[int, Any]]:
        """The prompt in pieces, with pauses as of a client that is still finding them."""
        tokens = case.token_ids
        pieces = [tokens[start : start + 100] for start in range(0, len(tokens), 100)]
        session = client.session(timeout_s=DEADLINE_S, **case.sampling)
        async with session as opened:
            for piece in pieces:
                await opened.append(list(piece))
                await asyncio.sleep(self._rng.choice((0.0, 0.05, 0.5)))
            async for delta in opened.finish():
                yield 0, delta
            yield 0, opened.completion


def is_right(got: Generated, expected: Generated) -> bool:
    """Tokens, text, the reason to end, and who the likeliest tokens were."""
    return (
        (got.token_ids, got.text) == (expected.token_ids, expected.text)
        and got.completion.finish_reason == expected.completion.finish_reason
        and ranked(got) == ranked(expected)
    )


def ranked(answer: Generated) -> list[list[int]]:
    return [[row.sampled.token_id, *(each.token_id for each in row.top)] for row in answer.logprobs]


def repeats(got: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether the answer goes back at some place, and is right on both sides of it."""
    shared = next((i for i, (one, other) in enumerate(zip(got, expected, strict=False)) if one != other), len(expected))
    return any(list(got[cut:]) == list(expected[back:]) for cut in range(shared + 1) for back in range(cut))
