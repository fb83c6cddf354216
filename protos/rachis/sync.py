"""The client for who has no event loop: the same calls, which wait.

A thread runs the loop of an `AsyncClient`. A client may be used by several threads, a session by one at a time; neither
outlives a fork. What is raised is the same (`rachis.errors`).
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

import grpc

from rachis.client import DEFAULT_TIMEOUT_S, AsyncClient, Generated, Piece
from rachis.prompts import Prompt
from rachis.session import AsyncSession, RefusedError
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

T = TypeVar("T")
_END = object()


class _Loop:
    """An event loop in a thread of its own, to the end of the process or until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rachis-client", daemon=True)
        self._thread.start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it returns or raises. Interrupted, for example by Ctrl-C, it cancels the coroutine."""
        if self.closed:
            coroutine.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def each(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Ended early, it closes what it is given."""
        # One that was interrupted in `anext` may be there for a moment still.
        turn = asyncio.Lock()
        try:
            while (item := self.wait(_next_of(items, turn))) is not _END:
                yield cast("T", item)
        finally:
            if not self.closed:
                self.wait(_close(items, turn))

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """Once nothing runs there that anybody waits for."""
        self.wait(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Session:
    """A streaming session, as `AsyncSession`, opened by `with`; made by `Client.session`."""

    def __init__(self, loop: _Loop, session: AsyncSession) -> None:
        self._loop = loop
        self._session = session

    def __enter__(self) -> Self:
        self._loop.wait(self._session.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.wait(self._session.__aexit__(kind, error, traceback))

    def append(self, piece: Any) -> None:
        """As `AsyncSession.append`."""
        self._loop.wait(self._session.append(piece))

    def append_all(self, pieces: Iterable[Any]) -> int:
        """Appends what an iterator gives as it gives it, and returns how many that were."""
        count = 0
        for piece in pieces:
            self.append(piece)
            count += 1
        return count

    def update(self, context: Any) -> None:
        """As `AsyncSession.update`."""
        self._loop.wait(self._session.update(context))

    def finish(self, closing: Prompt | None = None) -> Generator[generation.CompletionDelta, None, None]:
        """As `AsyncSession.finish`."""
        return self._loop.each(self._session.finish(closing))

    def deltas(self) -> Generator[generation.CompletionDelta, None, None]:
        """As `AsyncSession.deltas`."""
        return self._loop.each(self._session.deltas())

    @property
    def answering(self) -> bool:
        """As `AsyncSession.answering`."""
        return self._session.answering

    @property
    def completion(self) -> generation.Completion:
        return self._session.completion

    @property
    def first_token(self) -> api.SessionFirstToken | None:
        return self._session.first_token

    @property
    def progress(self) -> generation.SessionProgress:
        return self._session.progress

    @property
    def refusals(self) -> list[RefusedError]:
        return list(self._session.refusals)

    @property
    def request_id(self) -> str:
        return self._session.request_id


class Client:
    """As `AsyncClient`. Closed by `with`, or by `close`."""

    def __init__(
        self, address: str, *, credentials: grpc.ChannelCredentials | None = None, max_retries: int = 0
    ) -> None:
        self._loop = _Loop()
        try:
            self._client = self._loop.wait(_made(address, credentials, max_retries))
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call of this client; a second time it does nothing."""
        if not self._loop.closed:
            self._loop.wait(self._client.close())
            self._loop.close()

    @property
    def resumes(self) -> int:
        return self._client.resumes

    @property
    def retries(self) -> int:
        return self._client.retries

    def generate(self, prompt: Prompt, *, timeout_s: float = DEFAULT_TIMEOUT_S, **wishes: Any) -> Generated:
        """As `AsyncClient.generate`."""
        return self._loop.wait(self._client.generate(prompt, timeout_s=timeout_s, **wishes))

    def generate_choices(
        self, prompt: Prompt, n: int, *, timeout_s: float = DEFAULT_TIMEOUT_S, **wishes: Any
    ) -> list[Generated]:
        """As `AsyncClient.generate_choices`."""
        return self._loop.wait(self._client.generate_choices(prompt, n, timeout_s=timeout_s, **wishes))

    def stream(
        self, prompt: Prompt, *, timeout_s: float = DEFAULT_TIMEOUT_S, **wishes: Any
    ) -> Generator[Piece, None, None]:
        """As `AsyncClient.stream`."""
        return self._loop.each(self._client.stream(prompt, timeout_s=timeout_s, **wishes))

    def stream_choices(
        self, prompt: Prompt, n: int, *, timeout_s: float = DEFAULT_TIMEOUT_S, **wishes: Any
    ) -> Generator[tuple[int, Piece], None, None]:
        """As `AsyncClient.stream_choices`."""
        return self._loop.each(self._client.stream_choices(prompt, n, timeout_s=timeout_s, **wishes))

    def session(
        self, prefix: Prompt | None = None, *, mode: Literal["append", "update"] = "append", **wishes: Any
    ) -> Session:
        """As `AsyncClient.session`."""
        return Session(self._loop, self._client.session(prefix, mode=mode, **wishes))

    def is_serving(self, timeout_s: float) -> bool:
        """As `AsyncClient.is_serving`."""
        return self._loop.wait(self._client.is_serving(timeout_s))


async def _made(address: str, credentials: grpc.ChannelCredentials | None, max_retries: int) -> AsyncClient:
    return AsyncClient(address, credentials=credentials, max_retries=max_retries)


async def _next_of(items: AsyncGenerator[T, None], turn: asyncio.Lock) -> T | object:
    async with turn:
        return await anext(items, _END)


async def _close(items: AsyncGenerator[T, None], turn: asyncio.Lock) -> None:
    async with turn:
        await items.aclose()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
