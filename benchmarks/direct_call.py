"""One request straight to a worker, without the router: the direct side of a comparison."""

from typing import Any

from rachis import Generated, conventions
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_core.ids import new_request_id
from cluster_wire.members import member_metadata
from cluster_wire.secret import Secret
from cluster_wire.worker_tls import worker_channel

_MAX_MESSAGE_BYTES = 256 << 20


class DirectWorker:
    """One worker, called as the router calls it. `generation` is that of its registration. secret: of its service."""

    def __init__(self, address: str, generation_number: int, secret: Secret | None = None) -> None:
        self._metadata = member_metadata(secret)
        self._channel = worker_channel(secret)(address, options=conventions.channel_options(_MAX_MESSAGE_BYTES))
        self._stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._generation = generation_number

    async def decode(
        self, token_ids: list[int], sampling: dict[str, Any], timeout_s: float = 600.0, *, priority: int = 0
    ) -> Generated:
        """The whole completion, prefilled and decoded by this worker alone. priority: as in `GenerateRequest`."""
        request = wire.DecodeRequest(
            request_id=new_request_id(),
            generation=self._generation,
            token_ids=token_ids,
            sampling=generation.SamplingParams(**sampling),
            priority=priority,
        )
        generated = Generated()
        async for message in self._stub.Decode(request, timeout=timeout_s, metadata=self._metadata):
            if message.HasField("delta"):
                generated.add(message.delta)
            elif message.HasField("end"):
                generated.add(message.end.delta)
                generated.completion.finish_reason = message.end.finish_reason
        return generated

    async def first_token(self, token_ids: list[int], timeout_s: float = 600.0) -> None:
        """One greedy token from a prefill worker."""
        request = wire.PrefillRequest(
            request_id=new_request_id(),
            generation=self._generation,
            token_ids=token_ids,
            sampling=generation.SamplingParams(max_tokens=1, temperature=0),
        )
        await self._stub.Prefill(request, timeout=timeout_s, metadata=self._metadata)

    async def close(self) -> None:
        await self._channel.close(None)
