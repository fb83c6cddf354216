"""The asyncio client of a service.

async with AsyncClient("127.0.0.1:7421") as client:
    async for delta in client.stream("k1=blue; k1=", max_tokens=8):
        print(delta.text, end="")
"""

import asyncio
import copy
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

import grpc

from rachis import routers, tls
from rachis.client_channel import ClientChannel
from rachis.errors import FailedError, typed
from rachis.lost_routers import LostRouters, Received
from rachis.metadata_channel import Metadata, key_metadata
from rachis.outbox import KeptBytes
from rachis.prompts import Prompt, prompt_of
from rachis.requests import answers_of, filled, mode_of, of_one_answer, retries_of, sampling_of, seconds_of
from rachis.retries import Retries, RetryBudget
from rachis.session import AsyncSession
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import admin_pb2_grpc, router_pb2_grpc
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

DEFAULT_TIMEOUT_S = 600.0
# Of what is asked of administration.
_ADMIN_S = 10.0
# Of the environment: the caller's key, where none is given.
KEY_VARIABLE = "RACHIS_API_KEY"
Piece = generation.CompletionDelta | generation.Completion
# grpc.health.v1.Health/Check without its library: what is asked of the whole server is an empty message, and SERVING is
# these two bytes.
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"


@dataclass(slots=True)
class Generated:
    """A whole completion."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[generation.PositionLogprobs] = field(default_factory=list)
    completion: generation.Completion = field(default_factory=generation.Completion)
    prompt_logprobs: list[generation.PositionLogprobs] = field(default_factory=list)

    def add(self, delta: generation.CompletionDelta) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs


class AsyncClient:
    """One channel to a service. Whatever a service refuses is raised as one of `rachis.errors`.

    address: `host:port` of its router, or several `ip:port` with commas between them: they take calls in turn. Where a
    router is gone, another one goes on with the answer (`lost_routers`); `resumes` counts answers that went on so, each
    time. credentials: of routers with TLS, from `grpc.ssl_channel_credentials`; without them the environment says
    what is trusted (`tls`), and where it says nothing, nothing is encrypted. server_name: in the routers' certificate,
    where their address has another. api_key: of a service that has keys; without one it is that of the variable
    RACHIS_API_KEY, if that is set. max_retries: how often an answer is asked for again that was refused before
    anything came, at first or where it was to go on, when the service says that this may help (`Retries`); `retries`
    counts them. Raises InvalidInputError, and ClosedError where one was open before a fork, as each call does then and
    once the client is closed.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str = "",
        api_key: str | None = None,
        max_retries: int = 0,
    ) -> None:
        self.resumes = self.retries = 0
        self._max_retries = retries_of(max_retries)
        self._budget = RetryBudget()
        self._kept = KeptBytes(routers.KEPT_BYTES)
        if credentials is None:
            credentials = tls.credentials_of(os.environ)
            server_name = server_name or os.environ.get(tls.SERVER_NAME_VARIABLE, "")
        self._channel = routers.channel(address, credentials, server_name)
        self._health = ClientChannel(self._channel, ()).unary_unary(_HEALTH_CHECK, None, None)
        self._make_stubs(key_metadata(os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key))

    def _make_stubs(self, metadata: Metadata) -> None:
        self._metadata = tuple(metadata)
        channel: Any = ClientChannel(self._channel, metadata)
        self._router = router_pb2_grpc.RouterServiceStub(channel)
        self.admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)

    def calling_with(self, metadata: Metadata) -> "AsyncClient":
        """This client for another caller: calls have that metadata, and no key of its own. It ends with this one."""
        other = copy.copy(self)
        other._make_stubs(metadata)
        return other

    def with_metadata(self, metadata: Metadata) -> "AsyncClient":
        """This client, whose calls bring that along as well: a `traceparent`, say. It ends with this one."""
        return self.calling_with((*self._metadata, *metadata))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call of this client."""
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
        self, prompt: Prompt, *, timeout_s: float = DEFAULT_TIMEOUT_S, **wishes: Any
    ) -> AsyncGenerator[Piece, None]:
        """Deltas, then the completion. Closing it early cancels the request. wishes: as of `stream_choices`."""
        choices = self.stream_choices(prompt, 1, timeout_s=timeout_s, **of_one_answer(wishes))
        async with aclosing(choices) as pieces:
            async for _, piece in pieces:
                yield piece

    async def stream_choices(
        self,
        prompt: Prompt,
        n: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        **sampling: Any,
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Deltas of n answers, as they come, with the number of their answer, and the completion of each.

        Closing the iterator early cancels the request. Choice i has seed + i, where there is a seed. prompt: a str,
        token ids, chat messages as dicts, or a `PromptInput`. model: the name of a LoRA adapter; empty: the model
        alone. request_id: at most 128 characters; one is made where it is empty. cache_salt: only requests with the
        same one share KV. priority: lower goes first. sampling: the fields of `SamplingParams`. Raises RachisError,
        InvalidInputError.
        """
        request = api.GenerateRequest(prompt=prompt_of(prompt), sampling=sampling_of(sampling), n=answers_of(n))
        filled(request, {"model": model, "request_id": request_id, "cache_salt": cache_salt, "priority": priority})
        deadline_s, lost = monotonic() + seconds_of(timeout_s), LostRouters()
        received, completed = [Received() for _ in range(n)], set[int]()
        retries = self._budget.of_request(self._max_retries)
        while True:
            try:
                pieces = self._from_one_router(request, received, deadline_s)
                async with aclosing(pieces) as stream:
                    async for choice, piece in stream:
                        if isinstance(piece, generation.CompletionDelta):
                            received[choice].add(piece)
                        elif choice in completed:
                            # Told by a router that is gone.
                            continue
                        else:
                            completed.add(choice)
                        yield choice, piece
                break
            except grpc.aio.AioRpcError as error:
                if len(completed) == n:
                    return
                if not await self._goes_on(retries, error, lost, sum(map(len, received)), deadline_s):
                    raise typed(error) from None
        if len(completed) < n:
            raise FailedError.local(f"the service ended the call after {len(completed)} of {n} completions")

    async def _from_one_router(
        self, request: api.GenerateRequest, received: Sequence[Received], deadline_s: float
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """What comes until it ends."""
        left_s = max(0.0, deadline_s - monotonic())
        call = self.resume(request, received, left_s) if any(received) else self.call(request, left_s)
        try:
            async for response in call:
                yield response.choice, response.delta if response.HasField("delta") else response.completion
        finally:
            call.cancel()

    async def _goes_on(
        self,
        retries: Retries,
        error: grpc.aio.AioRpcError,
        lost: LostRouters,
        received: int,
        deadline_s: float,
    ) -> bool:
        """Whether what is missing after so many tokens can be asked for again: of another router, where one is gone;
        where it was refused before anything of it came, once that has waited as long as the router says."""
        wait_s = None
        if not lost.served(received):
            wait_s = retries.wait_s(typed(error), deadline_s - monotonic(), has_begun=bool(received))
        if wait_s is None:
            return await self._finds_another(error, lost, received, deadline_s)
        self.retries += 1
        await asyncio.sleep(wait_s)
        return True

    async def _finds_another(
        self, error: grpc.aio.AioRpcError, lost: LostRouters, received: int, deadline_s: float
    ) -> bool:
        """Whether a router is gone, after so many tokens, and another one can be asked for what is missing."""
        if not routers.is_lost(error) or not lost.may_go_on(received, monotonic()):
            return False
        await asyncio.sleep(routers.SETTLE_S)
        if not await routers.connected(self._channel, min(lost.reconnect_s, deadline_s - monotonic())):
            return False
        self.resumes += bool(received)
        return True

    async def generate(self, prompt: Prompt, *, timeout_s: float = DEFAULT_TIMEOUT_S, **wishes: Any) -> Generated:
        """The whole completion at once. wishes: as of `stream_choices`."""
        (generated,) = await self.generate_choices(prompt, 1, timeout_s=timeout_s, **of_one_answer(wishes))
        return generated

    async def generate_choices(
        self, prompt: Prompt, n: int, *, timeout_s: float = DEFAULT_TIMEOUT_S, **wishes: Any
    ) -> list[Generated]:
        """n whole completions at once. wishes: as of `stream_choices`."""
        choices = [Generated() for _ in range(answers_of(n))]
        async for choice, piece in self.stream_choices(prompt, n, timeout_s=timeout_s, **wishes):
            if isinstance(piece, generation.Completion):
                choices[choice].completion = piece
            else:
                choices[choice].add(piece)
        return choices

    def session(
        self,
        prefix: Prompt | None = None,
        *,
        mode: Literal["append", "update"] = "append",
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        received: Received | None = None,
        **sampling: Any,
    ) -> AsyncSession:
        """A streaming session, opened by `async with`; see `rachis.session`.

        prefix: what comes before the context: a str, token ids, chat messages or a `PromptInput`. Of chat messages the
        last one stays open, and the context goes into it. received: of an earlier session of the same input, whose
        answer this one goes on with; what is taken of it is added.
        """
        opening = api.SessionOpen(
            mode=mode_of(mode), prefix=prompt_of(prefix, "prefix"), sampling=sampling_of(sampling)
        )
        filled(opening, {"model": model, "request_id": request_id, "cache_salt": cache_salt, "priority": priority})
        received = Received() if received is None else received
        most_s = seconds_of(timeout_s)
        goes_on = partial(self._goes_on, self._budget.of_request(self._max_retries))
        return AsyncSession(self._router.StreamGenerate, opening, most_s, self._kept, goes_on, received)

    async def workers(self, *, hottest_prefixes: int = 0, batch_entries: int = 0) -> Sequence[admin.WorkerView]:
        """Raises RachisError."""
        wanted = {"hottest_prefixes": hottest_prefixes, "batch_entries": batch_entries}
        request = filled(admin.ListWorkersRequest(), wanted)
        response: admin.ListWorkersResponse = await _answered(self.admin.ListWorkers(request, timeout=_ADMIN_S))
        return response.workers

    async def identity(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> api.GetIdentityResponse:
        """Who this client is to the service; another router says it where one is gone. Raises RachisError."""
        deadline_s, lost = monotonic() + seconds_of(timeout_s), LostRouters()
        while True:
            try:
                left_s = max(0.0, deadline_s - monotonic())
                told: api.GetIdentityResponse = await self._router.GetIdentity(api.GetIdentityRequest(), timeout=left_s)
                return told
            except grpc.aio.AioRpcError as error:
                if not await self._finds_another(error, lost, 0, deadline_s):
                    raise typed(error) from None

    async def models(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> api.ListModelsResponse:
        """What the service serves: its model, and adapters beside it. Raises RachisError."""
        asked = self._router.ListModels(api.ListModelsRequest(), timeout=seconds_of(timeout_s))
        told: api.ListModelsResponse = await _answered(asked)
        return told

    async def is_serving(self, timeout_s: float) -> bool:
        """Whether a router takes requests: what its health service says, and False where it does not answer in time."""
        try:
            answer = await self._health(b"", timeout=seconds_of(timeout_s))
        except grpc.aio.AioRpcError:
            return False
        return bool(answer == _SERVING)

    async def router_status(self) -> admin.GetRouterStatusResponse:
        """Raises RachisError."""
        asked = self.admin.GetRouterStatus(admin.GetRouterStatusRequest(), timeout=_ADMIN_S)
        response: admin.GetRouterStatusResponse = await _answered(asked)
        return response


async def _answered(call: Any) -> Any:
    """Raises RachisError."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise typed(error) from None
