"""Streams that fail, of the two routes whose clients vLLM would not tell why.

It ends an answer of `/v1/responses` in the midst of a chunk, and in `/v1/messages` it says what pydantic thinks of the
error of the chat behind it. Here both end with the failure's own sentence, as each API has it. Where nothing was said
before, `late_status` answers in their place.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from control_plane.gateway.late_status import SAYS_NOTHING
from control_plane.gateway.router_core import FAILURES, note_failure
from control_plane.gateway.vllm_responses import error_event, failed_event

logger = logging.getLogger(__name__)

_INTERNAL = 500
_MESSAGES = "/v1/messages"
_ERROR = "event: error\n"


class EndedResponses:
    """By the names that vLLM's routes call. serving: vLLM's own class for the Responses API, which raises."""

    def __init__(self, serving: Any) -> None:
        self.serving = serving

    async def create_responses(self, request: Any, raw_request: Request) -> Any:
        made = await self.serving.create_responses(request, raw_request)
        return _ended(made) if isinstance(made, AsyncGenerator) else made

    async def retrieve_responses(self, response_id: str, **wishes: Any) -> Any:
        return await self.serving.retrieve_responses(response_id, **wishes)

    async def cancel_responses(self, response_id: str) -> Any:
        return await self.serving.cancel_responses(response_id)


class EndedMessages:
    """The same, for Anthropic's API. answer: makes one of an exception and the path that was asked."""

    def __init__(self, serving: Any, answer: Callable[[Exception, str], JSONResponse]) -> None:
        self._serving = serving
        self._answer = answer

    async def create_messages(self, request: Any, raw_request: Request) -> Any:
        made = await self._serving.create_messages(request, raw_request)
        return self._events(made) if isinstance(made, AsyncGenerator) else made

    async def count_tokens(self, request: Any, raw_request: Request) -> Any:
        return await self._serving.count_tokens(request, raw_request)

    async def _events(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        async with aclosing(events) as stream:
            async for event in stream:
                failures = FAILURES.get()
                if failures and event.startswith(_ERROR):
                    body = bytes(self._answer(failures[0], _MESSAGES).body)
                    yield f"{_ERROR}data: {body.decode()}\n\n"
                else:
                    yield event


async def _ended(events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The events of a response; where they fail, `error` is the next, and then what has said something has failed."""
    sent, response, has_said = 0, None, False
    try:
        async with aclosing(events) as stream:
            async for event in stream:
                sent += 1
                if event.type in SAYS_NOTHING:
                    response = event.response
                else:
                    has_said = True
                yield event
    except Exception as failure:  # whatever it is, its client has to hear of it
        note_failure(failure)
        error = error_event(failure, sent)
        if error.status == _INTERNAL:
            logger.exception("a response failed in its stream")
        yield error
        if has_said:
            yield failed_event(response, error)
