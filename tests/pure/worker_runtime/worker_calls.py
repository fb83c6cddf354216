"""Calls of a worker's services without a server: their context, a registration, and a prefill."""

from typing import Any

import grpc
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from prefill_worker.service import PrefillService
from tests.fakes.engine import FakeEngine

PROMPT = (10, 11, 12, 13)


class Aborted(Exception):
    pass


class RecordingContext:
    """The part of a ServicerContext that the services use."""

    code: str = ""
    details: str = ""
    left_s: float | None = None

    def time_remaining(self) -> float | None:
        return self.left_s

    async def abort(self, code: grpc.StatusCode, details: str, _metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self.code, self.details = code.name, details
        raise Aborted


def context() -> Any:
    """A context for calls that are not refused."""
    return RecordingContext()


def registration(**values: Any) -> wire.WorkerRegistration:
    return wire.WorkerRegistration(**{"worker_id": "w-0", "generation": 3, "state": wire.WORKER_STATE_READY, **values})


def prefill_request(hand_off: bool = True, **sampling: Any) -> wire.PrefillRequest:
    return wire.PrefillRequest(
        request_id="r#1",
        generation=3,
        token_ids=PROMPT,
        sampling=generation.SamplingParams(**{"max_tokens": 6, **sampling}),
        hand_off=hand_off,
    )


async def prefill(engine: FakeEngine, request: wire.PrefillRequest, **record: Any) -> wire.PrefillResponse:
    return await PrefillService(engine, registration(**record), lambda: None).Prefill(request, context())
