"""A call to a worker as its client has it: messages that come, those that were written, and how it ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc._cython import cygrpc
from rachis.v1 import worker_pb2 as wire


class Call:
    """Of `Decode` or `StreamOutputs`."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._error: Exception | None = None
        self.written: list[Any] = []
        self.is_cancelled = False
        self._cython_call = self
        self._metadata_sent = asyncio.Event()
        self._metadata_sent.set()

    def send(self, message: Any) -> None:
        self._messages.put_nowait(message)

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._messages.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self._messages.get()) is not None:
            yield message
        if self._error is not None:
            raise self._error

    async def read(self) -> Any:
        async for message in self:
            return message
        return grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs

    # What `rachis.grpc_private` writes by.

    def done(self) -> bool:
        return self._error is not None

    async def send_serialized_message(self, message: bytes) -> None:
        await asyncio.sleep(0)
        if self._error is not None:
            raise cygrpc.InternalError
        self.written.append(wire.StreamOutputsRequest.FromString(message))

    def cancel(self) -> None:
        self.is_cancelled = True
