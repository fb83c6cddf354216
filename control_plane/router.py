"""RouterService: validates, admits, dispatches, and ends every request exactly once in one counted outcome."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
from rachis import wire as conventions
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc
from rachis.v1 import worker_pb2 as wire
from rachis.wire import Context

from cluster_core.clock import monotonic_s
from cluster_core.errors import (
    ClientFault,
    DeadlineError,
    NotSupportedError,
    OverloadedError,
    RachisError,
    UnavailableError,
)
from cluster_core.ids import RequestId, new_request_id
from control_plane import validation
from control_plane.admission import Admission
from control_plane.dispatch import Dispatcher, Job
from control_plane.membership import Membership
from control_plane.request import Event, RequestLifecycle, State
from control_plane.tokenization import Tokenizer

logger = logging.getLogger(__name__)


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """The public service of one router."""

    def __init__(
        self,
        membership: Membership,
        dispatcher: Dispatcher,
        admission: Admission,
        tokenizer: Tokenizer,
        *,
        request_timeout_s: float,
    ) -> None:
        self._membership = membership
        self._dispatcher = dispatcher
        self._admission = admission
        self._tokenizer = tokenizer
        self._request_timeout_s = request_timeout_s
        self.outcomes: Counter[State] = Counter()

    async def Generate(self, request: api.GenerateRequest, context: Context) -> AsyncIterator[api.GenerateResponse]:
        arrived_s = monotonic_s()
        lifecycle = RequestLifecycle(RequestId(request.request_id) or new_request_id())
        try:
            async with aclosing(self._generate(request, context, lifecycle, arrived_s)) as responses:  # type: ignore[type-var]
                response: api.GenerateResponse
                async for response in responses:
                    yield response
        except RachisError as error:
            _end(lifecycle, _event_of(error))
            await context.abort(conventions.status_code(error), str(error), conventions.trailing_metadata(error))
        except (asyncio.CancelledError, GeneratorExit):
            remaining_s = context.time_remaining()
            expired = remaining_s is not None and remaining_s <= 0
            _end(lifecycle, Event.DEADLINE_PASSED if expired else Event.CANCELLED)
            raise
        except Exception:
            logger.exception("%s failed on a defect", lifecycle.request_id)
            _end(lifecycle, Event.FAULT)
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error, see the log for {lifecycle.request_id}")
        finally:
            self.outcomes[lifecycle.state] += 1

    async def StreamGenerate(
        self, request_iterator: AsyncIterator[api.StreamGenerateRequest], context: Context
    ) -> AsyncIterator[api.StreamGenerateResponse]:
        error = NotSupportedError("streaming sessions are not served by this version; use Generate")
        await context.abort(conventions.status_code(error), str(error), conventions.trailing_metadata(error))
        yield api.StreamGenerateResponse()  # type: ignore[unreachable]  # a stream has to be a generator

    async def _generate(
        self,
        request: api.GenerateRequest,
        context: Context,
        lifecycle: RequestLifecycle,
        arrived_s: float,
    ) -> AsyncIterator[api.GenerateResponse]:
        token_ids = await self._checked_tokens(request)
        remaining_s = context.time_remaining()
        job = Job(
            request_id=lifecycle.request_id,
            token_ids=token_ids,
            sampling=request.sampling,
            lifecycle=lifecycle,
            arrived_s=arrived_s,
            deadline_s=arrived_s + min(self._request_timeout_s, remaining_s or self._request_timeout_s),
        )
        job.own_s = monotonic_s() - arrived_s
        async with self._admission.slot():
            lifecycle.at(Event.ADMITTED)
            async with aclosing(self._dispatcher.run(job)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    received_s = monotonic_s()
                    response = api.GenerateResponse(request_id=job.request_id)
                    getattr(response, _FIELDS[type(piece).__name__]).CopyFrom(piece)
                    job.own_s += monotonic_s() - received_s
                    yield response

    async def _checked_tokens(self, request: api.GenerateRequest) -> list[int]:
        """The prompt's tokens, after every check. Raises ClientFault, or UnavailableError while no worker is known."""
        model = self._model()
        validation.check_request_id(request.request_id)
        validation.check_model(request.model, model.name)
        validation.check_prompt_form(request.prompt)
        validation.check_sampling(request.sampling, model)
        token_ids = await self._tokenizer.token_ids(request.prompt)
        validation.check_tokens(token_ids, request.sampling, model)
        return token_ids

    def _model(self) -> wire.ModelInfo:
        for member in self._membership.members():
            if member.registration.HasField("model"):
                return member.registration.model
        raise UnavailableError("no worker has registered yet", retry_after_ms=1000)


_FIELDS = {"CompletionDelta": "delta", "Completion": "completion"}


def _event_of(error: RachisError) -> Event:
    if isinstance(error, DeadlineError):
        return Event.DEADLINE_PASSED
    return Event.REFUSED if isinstance(error, ClientFault | OverloadedError) else Event.FAULT


def _end(lifecycle: RequestLifecycle, event: Event) -> None:
    if not lifecycle.ended:
        lifecycle.at(event)
