"""A prompt that is computed while more of it is to come, in a session over gRPC that stays open meanwhile.

    who             has
    `Preview`       what would be asked of a router for a request, and asks none
    `WarmPrompt`    a session that has been told how the prompt begins; answers the request that goes on from there

Both stand for a client where a request is answered, by `CLIENT`. What was told is held against the tokens of
the request itself: where it is no beginning of them, or the sampling is another, the session is cancelled and the
request goes its usual way, to the same tokens. The prefix cache still has the blocks that were computed. So it goes
where the session is old: a router counts the time of a request from its opening.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from rachis import AsyncSession, RachisError
from rachis.errors import InvalidInputError
from rachis.session import RefusedError
from rachis.v1 import generation_pb2 as generation

from cluster_core.clock import monotonic_s

Piece = generation.CompletionDelta | generation.Completion

# Who answers instead of the routers' client, by its `stream`: set by whoever asks, for its own task.
CLIENT: ContextVar[Any] = ContextVar("client", default=None)

# How long a router may take to take in what it is told; nothing depends on it.
_TELL_TIMEOUT_S = 5.0
# A session that has been open for longer answers nothing: most of a request's time is left to each answer.
_OLDEST_S = 120.0
# At the end of what is told, tokens that the text behind them may still change.
UNSURE_TOKENS = 4
_ENDED = (RachisError, RefusedError, TimeoutError)
# What opens a session that only computes, since how much may be generated is known with the whole prompt only.
_COMPUTES: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
_KEPT_WISHES = ("model", "cache_salt", "priority", "timeout_s")


class Sessions(Protocol):
    """Of `AsyncClient`."""

    def session(self, prefix: Any = None, **wishes: Any) -> AsyncSession: ...

    def stream(self, prompt: Any, **wishes: Any) -> AsyncGenerator[Piece, None]: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of a router. wishes: sampling, salt, priority and timeout, by the names of the client."""

    token_ids: tuple[int, ...]
    wishes: dict[str, Any] = field(default_factory=dict)


class Preview:
    """asked: None until the request has come this far."""

    def __init__(self) -> None:
        self.asked: Asked | None = None

    def stream(self, prompt: generation.PromptInput, **wishes: Any) -> AsyncGenerator[Piece, None]:
        self.asked = Asked(tuple(prompt.token_ids.ids), _without_id(wishes))
        return _no_answer()


@dataclass(slots=True)
class Outcomes:
    """How many sessions of a process have become what."""

    opened: int = 0
    answered: int = 0
    cancelled: int = 0
    lost: int = 0


class WarmPrompt:
    """Of one connection, used by one task at a time. told: the tokens that an open session has."""

    def __init__(self, client: Sessions, outcomes: Outcomes, now_s: Callable[[], float] = monotonic_s) -> None:
        self._client = client
        self._outcomes = outcomes
        self._now_s = now_s
        self._session: AsyncSession | None = None
        self._opened_with: dict[str, Any] = {}
        self._opened_s = 0.0
        self.told: tuple[int, ...] = ()

    async def tell(self, first: Asked, second: Asked, *, is_limited: bool) -> None:
        """How the prompt begins: as both continuations of it do. is_limited: the request says how much is generated.

        Returns in bounded time, whether or not a router takes it.
        """
        prefix = common_prefix(first.token_ids, second.token_ids)
        prefix = prefix[: max(0, len(prefix) - UNSURE_TOKENS)]
        wishes = first.wishes if is_limited else {**_COMPUTES, **_only(first.wishes, _KEPT_WISHES)}
        try:
            async with asyncio.timeout(_TELL_TIMEOUT_S):
                await self._tell(prefix, wishes)
        except _ENDED:
            await self._give_up()

    async def stream(self, prompt: generation.PromptInput, **wishes: Any) -> AsyncGenerator[Piece, None]:
        """The answer, as `AsyncClient.stream` gives it; of the session where it is the same request's."""
        asked = Asked(tuple(prompt.token_ids.ids), _without_id(wishes))
        if self._is_of(asked):
            closing, has_begun = list(asked.token_ids[len(self.told) :]), False
            session, self._session = self._session, None
            assert session is not None
            try:
                async with aclosing(session.finish(closing or None)) as deltas:
                    async for delta in deltas:
                        has_begun = True
                        yield delta
                self._outcomes.answered += 1
                yield session.completion
                return
            except _ENDED:
                if has_begun:
                    raise
                self._outcomes.lost += 1
            finally:
                self.told = ()
                await _leave(session)
        else:
            await self.cancel()
        async with aclosing(self._client.stream(prompt, **wishes)) as pieces:
            async for piece in pieces:
                yield piece

    async def cancel(self) -> None:
        """Nothing goes on from there."""
        if self._session is not None and not self._session.ended:
            self._outcomes.cancelled += 1
        elif self._session is not None:
            self._outcomes.lost += 1
        await self._leave_session()

    async def _tell(self, prefix: tuple[int, ...], wishes: dict[str, Any]) -> None:
        has_told = len(self.told)
        goes_on = self._is_open() and wishes == self._opened_with and prefix[:has_told] == self.told
        if goes_on and self._session is not None:
            if len(prefix) > has_told:
                await self._session.append(list(prefix[has_told:]))
        else:
            await self.cancel()
            if not prefix:
                return
            session = self._client.session(list(prefix), mode="append", **wishes)
            self._opened_s = self._now_s()
            await session.__aenter__()
            self._outcomes.opened += 1
            self._session, self._opened_with = session, wishes
        self.told = prefix

    def _is_open(self) -> bool:
        """A session that has refused anything lacks it, and answers another prompt."""
        return self._session is not None and not self._session.ended and not self._session.refusals

    def _is_of(self, asked: Asked) -> bool:
        begins_so = asked.token_ids[: len(self.told)] == self.told
        is_old = self._now_s() - self._opened_s > _OLDEST_S
        return self._is_open() and not is_old and begins_so and asked.wishes == self._opened_with

    async def _give_up(self) -> None:
        if self._session is not None:
            self._outcomes.lost += 1
        await self._leave_session()

    async def _leave_session(self) -> None:
        session, self._session, self.told = self._session, None, ()
        if session is not None:
            await _leave(session)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    length = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return tuple(one[: min(len(one), len(other)) if length is None else length])


async def _no_answer() -> AsyncGenerator[Piece, None]:
    for piece in tuple[Piece, ...]():
        yield piece
    raise InvalidInputError.local("was made to be looked at only", field="request")


async def _leave(session: AsyncSession) -> None:
    await session.__aexit__(None, None, None)


def _without_id(wishes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in wishes.items() if name != "request_id"}


def _only(wishes: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in wishes.items() if name in names}
