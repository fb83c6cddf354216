"""The Python client of a cluster: what the command line and the benchmarks use.

async with RachisClient("127.0.0.1:7421") as client:
    async for delta in client.stream(text_prompt("k1=blue; k1="), max_tokens=8):
        print(delta.text, end="")
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import grpc
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import admin_pb2_grpc, router_pb2_grpc
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from control_plane.client import routers
from control_plane.client.outbox import KeptBytes
from control_plane.client.prompts import chat_prompt, prompt_of, text_prompt, token_prompt
from control_plane.client.session import ClientSession

__all__ = ["DEFAULT_TIMEOUT_S", "Generated", "RachisClient", "chat_prompt", "text_prompt", "token_prompt"]

DEFAULT_TIMEOUT_S = 600.0
_MODES = {"append": generation.SESSION_MODE_APPEND, "update": generation.SESSION_MODE_UPDATE}


@dataclass(slots=True)
class Generated:
    """A whole completion."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[generation.PositionLogprobs] = field(default_factory=list)
    completion: generation.Completion = field(default_factory=generation.Completion)

    def add(self, delta: generation.CompletionDelta) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs


class RachisClient:
    """One channel to a service. Errors are `grpc.aio.AioRpcError`, with the router's sentence in `details()`.

    address: `host:port` of its router, or several `ip:port` with commas between them: they take calls in turn, and a
    call whose router is gone before it answered goes to another one. Raises InvalidInputError.
    """

    def __init__(self, address: str) -> None:
        # Where there is one router, nobody else can be told.
        self._kept = KeptBytes(routers.KEPT_BYTES if routers.are_several(address) else 0)
        self._channel = grpc.aio.insecure_channel(routers.target(address), routers.channel_options())
        self._router = router_pb2_grpc.RouterServiceStub(self._channel)
        self.admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    def call(self, request: api.GenerateRequest, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """The call itself, for who wants to cancel it or read its metadata."""
        return self._router.Generate(request, timeout=timeout_s)

    async def stream(
        self,
        prompt: generation.PromptInput,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        **sampling: Any,
    ) -> AsyncIterator[generation.CompletionDelta | generation.Completion]:
        """Deltas, then the completion. Closing the iterator early cancels the request."""
        request = api.GenerateRequest(
            prompt=prompt,
            sampling=generation.SamplingParams(**sampling),
            request_id=request_id,
            cache_salt=cache_salt,
            priority=priority,
        )
        call = self.call(request, timeout_s)
        try:
            async for response in call:
                yield response.delta if response.HasField("delta") else response.completion
        finally:
            call.cancel()

    async def generate(
        self,
        prompt: generation.PromptInput,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        **sampling: Any,
    ) -> Generated:
        """The whole completion at once."""
        generated = Generated()
        names: dict[str, Any] = {"request_id": request_id, "cache_salt": cache_salt, "priority": priority}
        pieces = self.stream(prompt, timeout_s=timeout_s, **names, **sampling)
        async for piece in pieces:
            if isinstance(piece, generation.Completion):
                generated.completion = piece
            else:
                generated.add(piece)
        return generated

    def session(
        self,
        prefix: Any = None,
        *,
        mode: Literal["append", "update"] = "append",
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **sampling: Any,
    ) -> ClientSession:
        """A streaming session, opened by `async with`; see `control_plane.client.session`.

        prefix: what comes before the context: a str, token ids, chat messages or a `PromptInput`. Of chat messages the
        last one stays open, and the context goes into it.
        """
        opening = api.SessionOpen(
            model=model,
            mode=_MODES[mode],
            prefix=prompt_of(prefix),
            sampling=generation.SamplingParams(**sampling),
            request_id=request_id,
            cache_salt=cache_salt,
            priority=priority,
        )
        return ClientSession(self._router.StreamGenerate, opening, timeout_s, self._kept)

    async def workers(self, *, hottest_prefixes: int = 0, batch_entries: int = 0) -> Sequence[admin.WorkerView]:
        request = admin.ListWorkersRequest(hottest_prefixes=hottest_prefixes, batch_entries=batch_entries)
        response: admin.ListWorkersResponse = await self.admin.ListWorkers(request, timeout=10)
        return response.workers

    async def router_status(self) -> admin.GetRouterStatusResponse:
        response: admin.GetRouterStatusResponse = await self.admin.GetRouterStatus(
            admin.GetRouterStatusRequest(), timeout=10
        )
        return response
