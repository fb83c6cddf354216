"""How the router calls workers: one channel for each address, and gRPC's errors as ours.

`WorkerLostError` means that the call may be tried on another worker; everything else is the request's own end.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from rachis import conventions, grpc_private
from rachis.metadata_channel import Metadata, MetadataChannel
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_core.background import BackgroundTasks
from cluster_core.errors import (
    DeadlineError,
    InvalidInputError,
    JobFailedError,
    NotSupportedError,
    OperatingFault,
    OutOfRangeError,
    OverloadedError,
    RachisError,
    UnavailableError,
)
from control_plane.fleet.output_streams import OutputStream, OutputStreams
from control_plane.model.worker_snapshot import WorkerSnapshot

# How long the calls on a channel may still run when its worker has left the registry.
CLOSE_GRACE_S = 600.0

# What gRPC, or the worker itself, says of a call whose server has ended, as against one that cannot be reached, is cut
# off, or stops in good order.
_DEATHS = re.compile(r"Socket closed|Connection reset|Broken pipe|recvmsg|sendmsg|the engine died")
# What it says of a server that no connection could be made to; the same errors say under a call that it broke.
_UNREACHED = re.compile(r"failed to connect")
# How long an answer whose call has ended is waited for without a message of its stream.
_REST_S = 10.0
_LAST = frozenset({"end", "handed_over"})
# What gRPC says when a message could not be written because the call had just ended.
_WRITE_FAILED = "Internal error from Core"


class WorkerLostError(OperatingFault):
    """The worker did not answer, or is not the one the call was meant for."""

    status = "UNAVAILABLE"


class WorkerDrainingError(WorkerLostError):
    """The worker takes nothing new, or gave the session back: nothing of it was lost there."""


class WorkerLeftError(WorkerDrainingError):
    """The worker began to drain while it had the call, which goes on elsewhere."""


class WorkerUnreachableError(WorkerLostError):
    """The worker was not reached: it has nothing of the request."""


class WorkerLacksAdapterError(WorkerLostError):
    """The worker cannot load the request's adapter: nothing else is wrong with it."""


class WorkerDiedError(WorkerLostError):
    """The worker's process or its engine ended under the call; who could not be reached at all has not died of it."""


class WorkerStalledError(WorkerLostError):
    """The worker's process or its engine hangs: it may come back, and answers nothing now."""


_ERRORS: dict[grpc.StatusCode, type[RachisError]] = {
    grpc.StatusCode.UNAVAILABLE: WorkerLostError,
    grpc.StatusCode.FAILED_PRECONDITION: WorkerLostError,
    grpc.StatusCode.CANCELLED: WorkerLostError,
    # It has another secret: it is none of ours.
    grpc.StatusCode.UNAUTHENTICATED: WorkerLostError,
    grpc.StatusCode.ABORTED: WorkerDrainingError,
    grpc.StatusCode.NOT_FOUND: WorkerLacksAdapterError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInputError,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRangeError,
    grpc.StatusCode.UNIMPLEMENTED: NotSupportedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.INTERNAL: JobFailedError,
}


class WorkerClient:
    """The workers' calls. One per router; `close` at its end."""

    def __init__(
        self,
        max_message_bytes: int,
        channel: Callable[..., grpc.aio.Channel] = grpc.aio.insecure_channel,
        metadata: Metadata = (),
    ) -> None:
        """channel: makes one, from an address and `options`. metadata: of each call."""
        self._metadata = metadata
        self._channel = channel
        self._options = conventions.channel_options(max_message_bytes)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._outputs = OutputStreams()
        self._background = BackgroundTasks()

    async def prefill(
        self, worker: WorkerSnapshot, request: wire.PrefillRequest, timeout_s: float
    ) -> wire.PrefillResponse:
        with _translated(worker):
            response: wire.PrefillResponse = await self._stub(worker.address).Prefill(request, timeout=timeout_s)
            return response

    @contextlib.asynccontextmanager
    async def prefill_session(self, worker: WorkerSnapshot, timeout_s: float) -> AsyncIterator["SessionCall"]:
        """A session at the worker; leaving the block cancels the call, and with it the worker's session."""
        call = self._stub(worker.address).PrefillSession(timeout=timeout_s)  # type: ignore[call-arg]  # it is written to
        try:
            yield SessionCall(worker, call)
        finally:
            call.cancel()

    def decode(self, worker: WorkerSnapshot, request: wire.DecodeRequest, timeout_s: float) -> "DecodeCall":
        open_stream: Callable[[], Any] = self._stub(worker.address).StreamOutputs  # type: ignore[assignment]
        stream = self._outputs.of(worker.address, worker.generation, open_stream)
        # The channel of now may be closed by when the stream is open.
        return DecodeCall(worker, stream, request, timeout_s, lambda: self._stub(worker.address).Decode)

    async def hand_over(self, worker: WorkerSnapshot, request_id: str, timeout_s: float) -> bool:
        request = wire.HandOverRequest(request_id=request_id, generation=worker.generation)
        with _translated(worker):
            response = await self._stub(worker.address).HandOver(request, timeout=timeout_s)
            return bool(response.handed_over)

    async def release(self, worker: WorkerSnapshot, lease_id: str, timeout_s: float) -> bool:
        request = wire.ReleaseHandoffRequest(lease_id=lease_id, generation=worker.generation)
        with _translated(worker):
            response = await self._stub(worker.address).ReleaseHandoff(request, timeout=timeout_s)
            return bool(response.released)

    def release_soon(self, worker: WorkerSnapshot, lease_id: str, timeout_s: float) -> None:
        """In the background, where there may be such a lease; it ends by itself where the worker is not reached."""

        async def release() -> None:
            with contextlib.suppress(RachisError):
                await self.release(worker, lease_id, timeout_s)

        self._background.start(release())

    async def status(
        self, address: str, request: wire.GetWorkerStatusRequest, timeout_s: float
    ) -> wire.GetWorkerStatusResponse:
        with _translated(None):
            response: wire.GetWorkerStatusResponse = await self._stub(address).GetWorkerStatus(
                request, timeout=timeout_s
            )
            return response

    async def logs(self, address: str, query: wire.LogQuery, timeout_s: float) -> wire.ReadLogsResponse:
        with _translated(None):
            request = wire.ReadLogsRequest(query=query)
            response: wire.ReadLogsResponse = await self._stub(address).ReadLogs(request, timeout=timeout_s)
            return response

    async def set_draining(
        self, address: str, draining: bool, timeout_s: float, *, move_sessions_after_s: float | None = None
    ) -> wire.WorkerState.ValueType:
        """move_sessions_after_s: as in `SetDrainingRequest`."""
        with _translated(None):
            request = wire.SetDrainingRequest(draining=draining)
            if move_sessions_after_s is not None:
                request.move_sessions_after_ms = round(move_sessions_after_s * 1000)
            response = await self._stub(address).SetDraining(request, timeout=timeout_s)
            return response.state

    async def prefix_claims(self, address: str, timeout_s: float) -> wire.GetPrefixClaimsResponse:
        with _translated(None):
            request = wire.GetPrefixClaimsRequest()
            response: wire.GetPrefixClaimsResponse = await self._stub(address).GetPrefixClaims(
                request, timeout=timeout_s
            )
            return response

    async def load_adapter(self, address: str, adapter: wire.Adapter, timeout_s: float) -> str:
        """The digest of what the worker has loaded."""
        with _translated(None):
            request = wire.PrepareAdapterRequest(adapter=adapter)
            response = await self._stub(address).PrepareAdapter(request, timeout=timeout_s)
            return str(response.digest)

    async def unload_adapter(self, address: str, digest: str, timeout_s: float) -> bool:
        """Whether the worker still has it: a request uses it."""
        with _translated(None):
            request = wire.DropAdapterRequest(digest=digest)
            response = await self._stub(address).DropAdapter(request, timeout=timeout_s)
            return bool(response.is_loaded)

    def keep_only(self, addresses: set[str]) -> None:
        """Closes the channels to workers that are no longer registered, once the calls on them have ended."""
        self._outputs.keep_only(addresses)
        for address in self._channels.keys() - addresses:
            self._background.start(self._channels.pop(address).close(CLOSE_GRACE_S))

    async def close(self) -> None:
        await self._background.cancel()
        await self._outputs.close()
        for channel in self._channels.values():
            await channel.close(None)

    def _stub(self, address: str) -> "worker_pb2_grpc.WorkerServiceAsyncStub":
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._channel(address, options=self._options)
        told: Any = MetadataChannel(channel, self._metadata) if self._metadata else channel
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(told)
        return stub


class DecodeCall:
    """One Decode call, whose responses come through the worker's output stream. It is read once, and may be left
    meanwhile."""

    def __init__(
        self,
        worker: WorkerSnapshot,
        stream: OutputStream,
        request: wire.DecodeRequest,
        timeout_s: float,
        method: Callable[[], Callable[..., Any]],
    ) -> None:
        """method: the stub's, as it is then."""
        self._worker = worker
        self._stream = stream
        self._request = request
        self._timeout_s = timeout_s
        self._method = method
        self._news = asyncio.Event()
        self._why: WorkerLostError | None = None

    def leave(self, why: WorkerLostError) -> None:
        """Whoever reads it gets this error, and the worker's job is cancelled."""
        self._why = why
        self._news.set()

    async def messages(self) -> AsyncIterator[wire.DecodeResponse]:
        """Deltas that have come together are one. Closing the iterator early cancels the call, and with it the worker's
        job."""
        until_s = asyncio.get_running_loop().time() + self._timeout_s
        with self._stream.receiving(self._news.set) as inbox, _translated(self._worker):
            await self._opened()
            self._request.output_stream, self._request.output_call = self._stream.stream_id, inbox.number
            left_s = until_s - asyncio.get_running_loop().time()
            call = self._method()(self._request, timeout=left_s)
            # It is read although nothing comes: gRPC leaves garbage of a call that is cancelled and was not.
            ended = asyncio.ensure_future(conventions.next_message(call))
            ended.add_done_callback(self._heard)
            try:
                while True:
                    self._news.clear()
                    self._check_left()
                    response = inbox.unread.take()
                    if response is not None:
                        yield response
                        if response.WhichOneof("event") in _LAST:
                            return
                    elif self._stream.has_ended:
                        raise self._broken(WorkerLostError)
                    else:
                        await self._wait(ended, until_s)
            finally:
                ended.cancel()
                call.cancel()

    async def _opened(self) -> None:
        """Raises DeadlineError, what the call is left for, and WorkerUnreachableError: nothing of it is there yet."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self._stream.is_open:
                    self._news.clear()
                    self._check_left()
                    if self._stream.has_ended:
                        raise self._broken(WorkerUnreachableError)
                    await self._news.wait()
        except TimeoutError:
            raise DeadlineError("Deadline Exceeded") from None

    def _heard(self, ended: "asyncio.Future[Any]") -> None:
        """The call has ended. Why is retrieved here, since nobody may wait for it any more."""
        if not ended.cancelled():
            ended.exception()
        self._news.set()

    async def _wait(self, ended: "asyncio.Future[Any]", until_s: float) -> None:
        """For news. Raises what the call has ended with; of one that has ended well the rest is on its way, and gRPC
        keeps no deadline any more. until_s: on the loop's clock."""
        if not ended.done():
            await self._news.wait()
            return
        if ended.result() is not None:
            raise WorkerLostError(f"worker {self._worker.worker_id} answered on the call itself")
        taken, loop = self._stream.taken, asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(loop.time() + _REST_S, until_s)):
                await self._news.wait()
        except TimeoutError:
            if loop.time() >= until_s:
                raise DeadlineError("Deadline Exceeded") from None
            # Others' rows may go before.
            if self._stream.taken == taken:
                raise WorkerLostError(f"worker {self._worker.worker_id} ended the call early") from None

    def _check_left(self) -> None:
        if self._why is not None:
            raise self._why

    def _broken(self, kind: type[WorkerLostError]) -> Exception:
        """What the stream's end is to this call: it is lost, whatever ended the stream. kind: of its loss, unless the
        stream tells a better one."""
        error = self._stream.error
        if error is None:
            return WorkerDrainingError(f"worker {self._worker.worker_id} drains")
        is_told = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAVAILABLE
        if is_told and kind is WorkerLostError:
            return error
        details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        return kind(f"worker {self._worker.worker_id}: {details}")


class SessionCall:
    """One PrefillSession call: one task writes, another one reads."""

    def __init__(self, worker: WorkerSnapshot, call: Any) -> None:
        self._worker = worker
        self._call = call

    async def write(self, request: wire.PrefillSessionRequest) -> bool:
        """Waits while the worker takes nothing in. False after the call's end: `read` says why it ended."""
        return await grpc_private.write(self._call, request)

    async def read(self) -> wire.PrefillSessionResponse:
        """Raises WorkerLostError when the worker ended the stream, and what the call ended with."""
        with _translated(self._worker):
            response: wire.PrefillSessionResponse | None = await conventions.next_message(self._call)
        if response is None:
            raise WorkerLostError(f"worker {self._worker.worker_id} ended the stream early")
        return response


@contextlib.contextmanager
def _translated(worker: WorkerSnapshot | None):  # type: ignore[no-untyped-def]
    try:
        yield
    except grpc.aio.AioRpcError as error:
        name = f"worker {worker.worker_id}: " if worker else ""
        # Also where the worker had ended the call for a reason of its own, which gRPC then does not tell any more.
        broke = (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, _WRITE_FAILED)
        kind = WorkerLostError if broke else _ERRORS.get(error.code(), UnavailableError)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            if _UNREACHED.search(error.details() or ""):
                kind = WorkerUnreachableError
            elif _DEATHS.search(error.details() or ""):
                kind = WorkerDiedError
        raise kind(f"{name}{error.details() or error.code().name}") from None
