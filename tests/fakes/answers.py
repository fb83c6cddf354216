"""What tests read from the answers and errors of a router, and the texts that they expect of a fake engine."""

from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_core.engine_jobs import SamplingSpec
from tests.fakes.engine import expected_text

HELLO = tuple(b"hello")


def whole_text(max_tokens: int = 8, seed: int | None = None) -> str:
    """What one engine alone answers to `hello`."""
    return expected_text(
        HELLO, SamplingSpec(max_tokens=max_tokens, temperature=0.0 if seed is None else 1.0, seed=seed)
    )


def session_text(prompt: str, max_tokens: int = 8) -> str:
    """What one engine alone answers to a prompt."""
    return expected_text(tuple(prompt.encode()), SamplingSpec(max_tokens=max_tokens, temperature=0.0))


def text_of(responses: Sequence[api.GenerateResponse | api.StreamGenerateResponse]) -> str:
    return "".join(delta_of(response).text for response in responses)


def tokens_of(responses: Sequence[api.GenerateResponse | api.StreamGenerateResponse]) -> list[int]:
    return [token for response in responses for token in delta_of(response).token_ids]


def delta_of(response: api.GenerateResponse | api.StreamGenerateResponse) -> generation.CompletionDelta:
    if isinstance(response, api.StreamGenerateResponse) and response.HasField("first_token"):
        return response.first_token.delta
    return response.delta


def completion_of(responses: list[api.GenerateResponse]) -> generation.Completion:
    """The one completion, which is last."""
    assert [response.WhichOneof("event") for response in responses] == ["delta"] * (len(responses) - 1) + ["completion"]
    return responses[-1].completion


async def collected(call: Any) -> list[api.GenerateResponse]:
    return [response async for response in call]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def trailer(error: grpc.aio.AioRpcError, key: str) -> Any:
    metadata: Any = error.trailing_metadata()
    return dict(metadata)[key]


def retry_after_ms(error: grpc.aio.AioRpcError) -> int:
    return int(trailer(error, "retry-after-ms"))


def field_of(error: grpc.aio.AioRpcError) -> str:
    bad = BadRequest()
    assert Status.FromString(trailer(error, "grpc-status-details-bin")).details[0].Unpack(bad)
    return str(bad.field_violations[0].field)
