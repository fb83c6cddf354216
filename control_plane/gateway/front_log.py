"""What of the HTTP front's lines a gateway's log has: what clients send and are told has no place in it, nor who is
refused.

A refusal is what happens every day, and the router's log has how each request ended; vLLM and uvicorn write a traceback
for it. Lines of what handles prompts and answers are written without what is filled in, and exceptions without what
they say, but for the system's and those of connections: their type, and where they were raised.
"""

import logging
import traceback
from asyncio import CancelledError

import grpc
from redis.exceptions import RedisError

from cluster_core.event_log import message_of

# Of vLLM: they have texts of clients and of models in their hands.
_OF_TEXTS = ("vllm.entrypoints", "vllm.parser", "vllm.reasoning", "vllm.renderers", "vllm.tool_parsers")
# Lines, before anything is filled in, that nothing but a refusal brings about.
_OF_REFUSALS = {
    # Of a WebSocket: what uvicorn says of each, and as an error where the answer has a body.
    '%s - "WebSocket %s" 403',
    '%s - "WebSocket %s" %d',
    "connection rejected (%d %s)",
    "ASGI callable returned without completing handshake.",
    "ASGI callable returned without sending handshake.",
    # Of a model that is not served.
    "Error with model %s",
}
_MOST_CAUSES = 8


class FrontLog(logging.Filter):
    """refusals: exceptions that a client brings about, or is to come back after."""

    def __init__(self, refusals: tuple[type[BaseException], ...]) -> None:
        super().__init__()
        self._refusals = (*refusals, CancelledError)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, self._refusals) or (isinstance(record.msg, str) and record.msg in _OF_REFUSALS):
            return False
        if record.name.startswith(_OF_TEXTS):
            record.args = ()
        if error is not None:
            record.msg, record.args = _without(message_of(record), error), ()
            record.exc_info, record.exc_text = None, _without_words(error)
        return True


def _is_of_system(error: BaseException) -> bool:
    """Of the system's errors and those of what the gateway is connected to nothing is a client's text."""
    return isinstance(error, OSError | RedisError | grpc.RpcError)


def _without(message: str, error: BaseException) -> str:
    """asyncio shows an exception in the lines behind the first, and some lines of vLLM within them."""
    if _is_of_system(error):
        return message
    told, shown = message.partition("\n")[0], str(error)
    return told.replace(shown, "...") if shown else told


def _without_words(error: BaseException) -> str:
    """As a traceback, without what the exceptions say: what came first stands first."""
    told: list[str] = []
    at: BaseException | None = error
    while at is not None and len(told) < _MOST_CAUSES:
        frames = "".join(traceback.format_tb(at.__traceback__))
        says = f": {at}" if _is_of_system(at) else ""
        kind = f"{type(at).__module__}.{type(at).__qualname__}{says}"
        told.insert(0, f"Traceback (most recent call last):\n{frames}{kind}")
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\n\n".join(told)
