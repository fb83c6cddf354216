"""The Python client of a service, on grpcio and protobuf alone: `Client`, `AsyncClient` and their sessions.

with Client("127.0.0.1:7421") as client:
    print(client.generate("k1=blue; k2=red; k1=", temperature=0, max_tokens=2).text)
"""

from rachis.client import DEFAULT_TIMEOUT_S, AsyncClient, Generated
from rachis.errors import (
    ClosedError,
    DeadlineError,
    FailedError,
    InvalidInputError,
    NotFoundError,
    NotSupportedError,
    OutOfOrderError,
    OutOfRangeError,
    OverloadedError,
    PermissionDeniedError,
    RachisError,
    UnauthenticatedError,
    UnavailableError,
    WithdrawnError,
)
from rachis.lost_routers import Received
from rachis.prompts import Prompt, chat_prompt, text_prompt, token_prompt
from rachis.session import AsyncSession, RefusedError, stream_documents
from rachis.sync import Client, Session
from rachis.v1.generation_pb2 import CompletionDelta, SamplingParams, StructuredOutputs
from rachis.v1.router_pb2 import Document

# Of the service, too: all wheels of a release have it.
__version__ = "0.1.0"

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "AsyncClient",
    "AsyncSession",
    "Client",
    "ClosedError",
    "CompletionDelta",
    "DeadlineError",
    "Document",
    "FailedError",
    "Generated",
    "InvalidInputError",
    "NotFoundError",
    "NotSupportedError",
    "OutOfOrderError",
    "OutOfRangeError",
    "OverloadedError",
    "PermissionDeniedError",
    "Prompt",
    "RachisError",
    "Received",
    "RefusedError",
    "SamplingParams",
    "Session",
    "StructuredOutputs",
    "UnauthenticatedError",
    "UnavailableError",
    "WithdrawnError",
    "__version__",
    "chat_prompt",
    "stream_documents",
    "text_prompt",
    "token_prompt",
]
