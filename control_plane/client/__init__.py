"""The Python client of a cluster."""

from control_plane.client.cluster_client import DEFAULT_TIMEOUT_S, Generated, RachisClient
from control_plane.client.lost_routers import Received
from control_plane.client.prompts import chat_prompt, text_prompt, token_prompt
from control_plane.client.session import ClientSession, RefusedError, stream_documents

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "ClientSession",
    "Generated",
    "RachisClient",
    "Received",
    "RefusedError",
    "chat_prompt",
    "stream_documents",
    "text_prompt",
    "token_prompt",
]
