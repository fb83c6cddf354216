"""The client for who has no event loop: the same calls, which wait.

A thread runs the loop of an `AsyncClient`. A client may be used by several threads, a session by one at a time; neither
outlives a fork. What is raised is the same (`rachis.errors`), ClosedError by what is waited for when another thread
closes the client, too.
"""

from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, Literal, Self

import grpc

from rachis.client import DEFAULT_TIMEOUT_S, AsyncClient, Generated, Piece
from rachis.loop_thread import LoopThread
from rachis.prompts import Prompt
from rachis.session import AsyncSession, RefusedError
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api


class Session:
    """A streaming session, as `AsyncSession`, opened by `with`; made by `Client.session`."""

    def __init__(self, loop: LoopThread, session: AsyncSession) -> None:
        self._loop = loop
        self._session = session

    def __enter__(self) -> Self:
        self._loop.wait(self._session.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.leave(self._session.__aexit__(kind, error, traceback))

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
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str = "",
        api_key: str | None = None,
        max_retries: int = 0,
    ) -> None:
        self._loop = LoopThread()
        try:
            making = _made(
                address, credentials=credentials, server_name=server_name, api_key=api_key, max_retries=max_retries
            )
            self._client = self._loop.wait(making)
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
        self._loop.close(self._client.close())

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

    def identity(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> api.GetIdentityResponse:
        """As `AsyncClient.identity`."""
        return self._loop.wait(self._client.identity(timeout_s))

    def models(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> api.ListModelsResponse:
        """As `AsyncClient.models`."""
        return self._loop.wait(self._client.models(timeout_s))

    def is_serving(self, timeout_s: float) -> bool:
        """As `AsyncClient.is_serving`."""
        return self._loop.wait(self._client.is_serving(timeout_s))


async def _made(address: str, **options: Any) -> AsyncClient:
    return AsyncClient(address, **options)
