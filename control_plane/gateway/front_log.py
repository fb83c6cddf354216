"""What of the HTTP front's lines a gateway's log has: what clients send and are told has no place in it, nor who is
refused.

A refusal is what happens every day, and the router's log has how each request ended; vLLM and uvicorn write a traceback
for it. Lines of what handles prompts and answers are written without what is filled in, and no exception with what it
says: its type, and where it was raised.
"""

import logging
import traceback
from asyncio import CancelledError

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
            record.exc_info, record.exc_text = None, _without_words(error)
        return True


def _without_words(error: BaseException) -> str:
    """As a traceback, without what the exceptions say: what came first stands first."""
    told: list[str] = []
    at: BaseException | None = error
    while at is not None and len(told) < _MOST_CAUSES:
        frames = "".join(traceback.format_tb(at.__traceback__))
        told.insert(0, f"Traceback (most recent call last):\n{frames}{type(at).__module__}.{type(at).__qualname__}")
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\n\n".join(told)
