"""vLLM's Responses API, asked for the events of one response: the same objects that become server-sent events.

Every name of vLLM's Responses API that Rachis touches is here. What comes before a response is put into its input: vLLM
never hears of `previous_response_id`, since it looks for that in a store of its own, which leaves tool calls out.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, cast

from openai.types.responses import ResponseErrorEvent as OpenAIResponseErrorEvent
from openai.types.responses import ResponseFailedEvent as OpenAIResponseFailedEvent
from pydantic import ValidationError
from vllm.entrypoints.openai.responses.protocol import (
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
)
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from control_plane.gateway.client_events import SocketError
from control_plane.gateway.conversation import Event
from control_plane.gateway.kept_responses import Item
from control_plane.gateway.refusals import headers_of

_OF_A_RESPONSE = (ResponseCreatedEvent, ResponseInProgressEvent, ResponseCompletedEvent)
_CODES = {404: "not_found", 429: "rate_limit_exceeded", 500: "server_error", 503: "server_overloaded", 504: "timeout"}


class ResponseErrorEvent(OpenAIResponseErrorEvent):
    """As OpenAI documents it; and `error`, by which OpenAI's client raises, and `status`, as in a WebSocket's frame."""

    status: int
    error: dict[str, Any]


class ResponseFailedEvent(OpenAIResponseFailedEvent):
    """With vLLM's class of responses, as vLLM's own events."""

    response: ResponsesResponse


class VllmResponses:
    """See `conversation.Responses`. serving: of vLLM's app."""

    def __init__(self, serving: OpenAIServingResponses) -> None:
        self._serving = serving

    async def events(
        self, fields: Mapping[str, Any], items: Sequence[Item], previous_response_id: str | None, connection: Any
    ) -> AsyncIterator[Event]:
        request = _checked(fields, items)
        is_stored = wants_to_be_stored(request)
        try:
            made = await self._serving.create_responses(request, connection)
            if isinstance(made, ErrorResponse):
                raise _as_socket_error(made)
            stream = cast(AsyncIterator[Any], made)
            async with aclosing(stream) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, _OF_A_RESPONSE):
                        event.response.previous_response_id = previous_response_id
                    yield _event(event, is_stored=is_stored)
        except SocketError:
            raise
        except Exception as error:
            # Whatever it is, its client has to hear of it as of any refusal.
            raise _as_socket_error(create_error_response(error), headers_of(error)) from error

    def prepared(self, created: Event) -> Event:
        response = ResponseCreatedEvent.model_validate_json(created.frame).response
        response.status = "completed"
        return _event(ResponseCompletedEvent(type="response.completed", sequence_number=2, response=response))


def _event(event: Any, *, is_stored: bool = True) -> Event:
    frame = event.model_dump_json(indent=None, by_alias=True)
    if not isinstance(event, _OF_A_RESPONSE):
        return Event(frame)
    response: ResponsesResponse = event.response
    output = tuple(item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in response.output)
    return Event(frame, response.id, output, isinstance(event, ResponseCompletedEvent), is_stored)


def request_of(fields: Mapping[str, Any], items: Sequence[Item]) -> ResponsesRequest:
    """Raises ValidationError and what vLLM's own checks raise."""
    return ResponsesRequest.model_validate({**fields, "input": [dict(item) for item in items]})


def wants_to_be_stored(request: ResponsesRequest) -> bool:
    """It does unless it says otherwise, in whatever form a boolean may have. vLLM clears this when it begins."""
    return request.store is not False


def names_itself(request: ResponsesRequest) -> bool:
    """Whether its client has chosen the id of the response."""
    return "request_id" in request.model_fields_set


def refused_name() -> ErrorResponse:
    sentence = "request_id is not supported for a response that is stored: the id is the service's to give. "
    return create_error_response(f'{sentence}Say "store": false, or leave it out.', param="request_id")


def missing(response_id: str, param: str) -> ErrorResponse:
    sentence = f"Response with id '{response_id}' not found."
    return create_error_response(sentence, "invalid_request_error", HTTPStatus.NOT_FOUND, param)


def is_refusal(made: Any) -> bool:
    return isinstance(made, ErrorResponse)


def ends(event: Any) -> bool:
    return isinstance(event, ResponseCompletedEvent | ResponseFailedEvent)


def error_event(failure: Exception, sequence_number: int) -> ResponseErrorEvent:
    """The same code and sentence as over a WebSocket."""
    told = _as_socket_error(create_error_response(failure), headers_of(failure))
    return ResponseErrorEvent(
        **told.told(), sequence_number=sequence_number, code=told.code, message=str(told), param=told.param
    )


def failed_event(response: ResponsesResponse, error: ResponseErrorEvent) -> ResponseFailedEvent:
    """What follows an `error`. response: as its events have had it."""
    said = {"code": error.code, "message": error.message}
    # vLLM's class takes fields of OpenAI's that it has not.
    failed = response.model_copy(update={"status": "failed", "error": said})
    return ResponseFailedEvent(type="response.failed", sequence_number=error.sequence_number + 1, response=failed)


def _checked(fields: Mapping[str, Any], items: Sequence[Item]) -> ResponsesRequest:
    unknown = fields.keys() - ResponsesRequest.model_fields.keys()
    if unknown:
        name = min(unknown)
        raise SocketError(f"Unknown parameter: '{name}'.", code="unknown_parameter", param=name)
    try:
        return request_of({**fields, "stream": True}, items)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"][:1])
        raise SocketError(f"{place}: {first['msg']}.", code="invalid_value", param=place or None) from None
    except Exception as error:  # noqa: BLE001 - vLLM's own checks raise errors of several kinds
        raise _as_socket_error(create_error_response(error)) from None


def _as_socket_error(refusal: ErrorResponse, headers: dict[str, str] | None = None) -> SocketError:
    error = refusal.error
    code = _CODES.get(error.code, "invalid_value" if error.code < 500 else "server_error")
    return SocketError(error.message, code=code, param=error.param, status=error.code, headers=headers)
