"""The Python client of a cluster: what the command line and the benchmarks use.

async with RachisClient("127.0.0.1:7421") as client:
    async for delta in client.stream(text_prompt("k1=blue; k1="), max_tokens=8):
        print(delta.text, end="")
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import grpc
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import admin_pb2_grpc, router_pb2_grpc
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_core.clock import monotonic_s
from control_plane.client import routers
from control_plane.client.lost_routers import LostRouters, Received
from control_plane.client.outbox import KeptBytes
from control_plane.client.prompts import chat_prompt, prompt_of, text_prompt, token_prompt
from control_plane.client.session import ClientSession

__all__ = ["DEFAULT_TIMEOUT_S", "Generated", "RachisClient", "Received", "chat_prompt", "text_prompt", "token_prompt"]

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

    address: `host:port` of its router, or several `ip:port` with commas between them: they take calls in turn. Where a
    router is gone, another one goes on with the answer (`lost_routers`); `resumes` counts answers that went on so, each
    time. Raises InvalidInputError.
    """

    def __init__(self, address: str) -> None:
        self.resumes = 0
        self._kept = KeptBytes(routers.KEPT_BYTES)
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
        """The call itself, of one router, for who wants to cancel it or read its metadata."""
        return self._router.Generate(request, timeout=timeout_s)

    def resume(self, request: api.GenerateRequest, received: Received, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """The call that goes on with an answer, of which so much has been received."""
        return self._router.Resume(api.ResumeRequest(request=request, received=received.to_wire()), timeout=timeout_s)

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
        deadline_s, received, lost = monotonic_s() + timeout_s, Received(), LostRouters()
        while True:
            try:
                async with aclosing(self._from_one_router(request, received, deadline_s)) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        yield piece
                return
            except grpc.aio.AioRpcError as error:
                if not await self._goes_on(error, lost, received, deadline_s):
                    raise

    async def _from_one_router(
        self, request: api.GenerateRequest, received: Received, deadline_s: float
    ) -> AsyncIterator[generation.CompletionDelta | generation.Completion]:
        """What comes until it ends, which is noted in `received`."""
        left_s = max(0.0, deadline_s - monotonic_s())
        call = self.resume(request, received, left_s) if received else self.call(request, left_s)
        is_complete = False
        try:
            async for response in call:
                is_complete = response.HasField("completion")
                received.add(response.delta)
                yield response.completion if is_complete else response.delta
        except grpc.aio.AioRpcError:
            if not is_complete:
                raise
        finally:
            call.cancel()

    async def _goes_on(
        self, error: grpc.aio.AioRpcError, lost: LostRouters, received: Received, deadline_s: float
    ) -> bool:
        """Whether a router is gone, and another one can be asked for what is missing of the answer."""
        if not routers.is_lost(error) or not lost.may_go_on(len(received)):
            return False
        if not await routers.connected(self._channel, min(lost.reconnect_s, deadline_s - monotonic_s())):
            return False
        self.resumes += bool(received)
        return True

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
        received: Received | None = None,
        **sampling: Any,
    ) -> ClientSession:
        """A streaming session, opened by `async with`; see `control_plane.client.session`.

        prefix: what comes before the context: a str, token ids, chat messages or a `PromptInput`. Of chat messages the
        last one stays open, and the context goes into it. received: of an earlier session of the same input, whose
        answer this one goes on with; what comes is added to it.
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
        received = received or Received()
        return ClientSession(self._router.StreamGenerate, opening, timeout_s, self._kept, self._goes_on, received)

    async def workers(self, *, hottest_prefixes: int = 0, batch_entries: int = 0) -> Sequence[admin.WorkerView]:
        request = admin.ListWorkersRequest(hottest_prefixes=hottest_prefixes, batch_entries=batch_entries)
        response: admin.ListWorkersResponse = await self.admin.ListWorkers(request, timeout=10)
        return response.workers

    async def router_status(self) -> admin.GetRouterStatusResponse:
        response: admin.GetRouterStatusResponse = await self.admin.GetRouterStatus(
            admin.GetRouterStatusRequest(), timeout=10
        )
        return response
