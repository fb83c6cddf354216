"""The Python client of a cluster: what the command line and the benchmarks use.

async with RachisClient("127.0.0.1:7421") as client:
    async for delta in client.stream(text_prompt("k1=blue; k1="), max_tokens=8):
        print(delta.text, end="")
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
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
Piece = generation.CompletionDelta | generation.Completion
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
        self._health = health_pb2_grpc.HealthStub(self._channel)
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

    def resume(
        self, request: api.GenerateRequest, received: Sequence[Received], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Any:
        """The call that goes on with the choices of an answer, of each of which so much has been received."""
        told = [each.to_wire() for each in received]
        return self._router.Resume(api.ResumeRequest(request=request, received=told), timeout=timeout_s)

    async def stream(
        self, prompt: generation.PromptInput, *, timeout_s: float = DEFAULT_TIMEOUT_S, **wishes: Any
    ) -> AsyncIterator[Piece]:
        """Deltas, then the completion. Closing it early cancels the request. wishes: as of `stream_choices`."""
        async with aclosing(self.stream_choices(prompt, 1, timeout_s=timeout_s, **wishes)) as pieces:  # type: ignore[type-var]
            async for _, piece in pieces:
                yield piece

    async def stream_choices(
        self,
        prompt: generation.PromptInput,
        n: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        **sampling: Any,
    ) -> AsyncIterator[tuple[int, Piece]]:
        """Deltas of n answers, as they come, with the number of their answer, and the completion of each.

        Closing the iterator early cancels the request. Choice i has seed + i, where there is a seed.
        """
        request = api.GenerateRequest(
            prompt=prompt,
            sampling=generation.SamplingParams(**sampling),
            request_id=request_id,
            cache_salt=cache_salt,
            priority=priority,
            n=n,
        )
        deadline_s, lost = monotonic_s() + timeout_s, LostRouters()
        received, completed = [Received() for _ in range(n)], set[int]()
        while True:
            try:
                pieces = self._from_one_router(request, received, deadline_s)
                async with aclosing(pieces) as stream:  # type: ignore[type-var]
                    async for choice, piece in stream:
                        if isinstance(piece, generation.CompletionDelta):
                            received[choice].add(piece)
                        elif choice in completed:
                            # Told by a router that is gone.
                            continue
                        else:
                            completed.add(choice)
                        yield choice, piece
                return
            except grpc.aio.AioRpcError as error:
                if len(completed) == n:
                    return
                if not await self._goes_on(error, lost, sum(map(len, received)), deadline_s):
                    raise

    async def _from_one_router(
        self, request: api.GenerateRequest, received: Sequence[Received], deadline_s: float
    ) -> AsyncIterator[tuple[int, Piece]]:
        """What comes until it ends."""
        left_s = max(0.0, deadline_s - monotonic_s())
        call = self.resume(request, received, left_s) if any(received) else self.call(request, left_s)
        try:
            async for response in call:
                yield response.choice, response.delta if response.HasField("delta") else response.completion
        finally:
            call.cancel()

    async def _goes_on(self, error: grpc.aio.AioRpcError, lost: LostRouters, received: int, deadline_s: float) -> bool:
        """Whether a router is gone, after so many tokens, and another one can be asked for what is missing."""
        if not routers.is_lost(error) or not lost.may_go_on(received, monotonic_s()):
            return False
        await asyncio.sleep(routers.SETTLE_S)
        if not await routers.connected(self._channel, min(lost.reconnect_s, deadline_s - monotonic_s())):
            return False
        self.resumes += bool(received)
        return True

    async def generate(
        self, prompt: generation.PromptInput, *, timeout_s: float = DEFAULT_TIMEOUT_S, **wishes: Any
    ) -> Generated:
        """The whole completion at once. wishes: as of `stream_choices`."""
        (generated,) = await self.generate_choices(prompt, 1, timeout_s=timeout_s, **wishes)
        return generated

    async def generate_choices(
        self, prompt: generation.PromptInput, n: int, *, timeout_s: float = DEFAULT_TIMEOUT_S, **wishes: Any
    ) -> list[Generated]:
        """n whole completions at once. wishes: as of `stream_choices`."""
        choices = [Generated() for _ in range(n)]
        async for choice, piece in self.stream_choices(prompt, n, timeout_s=timeout_s, **wishes):
            if isinstance(piece, generation.Completion):
                choices[choice].completion = piece
            else:
                choices[choice].add(piece)
        return choices

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
        answer this one goes on with; what is taken of it is added.
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
        received = Received() if received is None else received
        return ClientSession(self._router.StreamGenerate, opening, timeout_s, self._kept, self._goes_on, received)

    async def workers(self, *, hottest_prefixes: int = 0, batch_entries: int = 0) -> Sequence[admin.WorkerView]:
        request = admin.ListWorkersRequest(hottest_prefixes=hottest_prefixes, batch_entries=batch_entries)
        response: admin.ListWorkersResponse = await self.admin.ListWorkers(request, timeout=10)
        return response.workers

    async def is_serving(self, timeout_s: float) -> bool:
        """Whether a router takes requests: what its health service says, and False where it does not answer in time."""
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def router_status(self) -> admin.GetRouterStatusResponse:
        response: admin.GetRouterStatusResponse = await self.admin.GetRouterStatus(
            admin.GetRouterStatusRequest(), timeout=10
        )
        return response
