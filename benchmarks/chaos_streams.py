"""The clients of a run of `rachis chaos`: streams that are always open, plain requests and sessions, whose answers are
compared token by token with those of plain vLLM."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from cluster_core.clock import monotonic_s
from control_plane.client import RachisClient, token_prompt
from control_plane.client.session import RefusedError

SAMPLING: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
# Of one request; who has no end so long after it never gets one.
DEADLINE_S = 60.0
_GRACE_S = 30.0
_MOST_TRIES = 5
_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and what plain vLLM answers."""

    token_ids: tuple[int, ...]
    max_tokens: int
    expected: tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """requests: those that count, which a killed decode worker that had begun to answer does not spoil. first_try: of
    these, those that completed without being sent again. longest_pause_s: between two pieces of an answer that
    completed, or from the request to its first."""

    requests: int = 0
    first_try: int = 0
    completed: int = 0
    excused: int = 0
    application_retries: int = 0
    wrong: int = 0
    unended: int = 0
    longest_pause_s: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Try:
    tokens: list[int] = field(default_factory=list)
    began_s: float = 0.0
    last_s: float = 0.0
    pause_s: float = 0.0
    status: str = ""
    sentence: str = ""

    def take(self, token_ids: Sequence[int]) -> None:
        now_s = monotonic_s()
        self.pause_s, self.last_s = max(self.pause_s, now_s - self.last_s), now_s
        self.tokens += token_ids


class Streams:
    """`run` until cancelled. address: of all the routers. decode_kills: when decode workers were killed."""

    def __init__(self, cases: Sequence[Case], address: str, decode_kills: Sequence[float], seed: int) -> None:
        self._cases = cases
        self._address = address
        self._decode_kills = decode_kills
        self._rng = random.Random(seed)
        self.tally = Tally()
        self.stopping = False

    async def run(self, streams: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(streams):
                tasks.create_task(self._stream())

    async def _stream(self) -> None:
        async with RachisClient(self._address) as client:
            while not self.stopping:
                case, is_session = self._rng.choice(self._cases), self._rng.random() < 0.4
                await self._request(client, case, is_session=is_session)

    async def _request(self, client: RachisClient, case: Case, *, is_session: bool) -> None:
        tally = self.tally
        for number in range(_MOST_TRIES):
            tried = await self._try(client, case, is_session=is_session)
            if number == 0:
                is_excused = bool(tried.status) and self._was_cut(tried)
                tally.requests += not is_excused
                tally.excused += is_excused
                tally.first_try += not tried.status
            if not tried.status:
                tally.completed += 1
                tally.wrong += tuple(tried.tokens) != case.expected
                tally.longest_pause_s = max(tally.longest_pause_s, tried.pause_s)
                return
            tally.statuses[tried.status] = tally.statuses.get(tried.status, 0) + 1
            tally.sentences.append(f"{tried.status} after {len(tried.tokens)} tokens: {tried.sentence}")
            # What came of an answer that broke off has to be right as well.
            tally.wrong += tuple(tried.tokens) != case.expected[: len(tried.tokens)]
            tally.application_retries += 1
            await asyncio.sleep(_RETRY_S)

    def _was_cut(self, tried: _Try) -> bool:
        """A decode worker had begun to answer, and some decode worker was killed meanwhile."""
        return len(tried.tokens) > 1 and any(tried.began_s <= at_s for at_s in self._decode_kills)

    async def _try(self, client: RachisClient, case: Case, *, is_session: bool) -> _Try:
        tried = _Try(began_s=monotonic_s(), last_s=monotonic_s())
        try:
            async with asyncio.timeout(DEADLINE_S + _GRACE_S):
                pieces = self._session(client, case) if is_session else self._plain(client, case)
                async with aclosing(pieces) as answer:  # type: ignore[type-var]
                    async for token_ids in answer:
                        tried.take(token_ids)
        except grpc.aio.AioRpcError as error:
            tried.status, tried.sentence = error.code().name, str(error.details())
        except RefusedError as error:
            tried.status, tried.sentence = error.status, str(error)
        except TimeoutError:
            tried.status = "UNENDED"
            self.tally.unended += 1
        return tried

    async def _plain(self, client: RachisClient, case: Case) -> AsyncIterator[Sequence[int]]:
        prompt = token_prompt(case.token_ids)
        async for piece in client.stream(prompt, timeout_s=DEADLINE_S, max_tokens=case.max_tokens, **SAMPLING):
            if hasattr(piece, "token_ids"):
                yield piece.token_ids

    async def _session(self, client: RachisClient, case: Case) -> AsyncIterator[Sequence[int]]:
        """The prompt in pieces, with pauses as of a client that is still finding them."""
        tokens = case.token_ids
        pieces = [tokens[start : start + 100] for start in range(0, len(tokens), 100)]
        session = client.session(timeout_s=DEADLINE_S, max_tokens=case.max_tokens, **SAMPLING)
        async with session as opened:
            for piece in pieces:
                await opened.append(list(piece))
                await asyncio.sleep(self._rng.choice((0.0, 0.05, 0.5)))
            async for delta in opened.finish():
                yield delta.token_ids
