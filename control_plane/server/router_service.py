"""RouterService: validates, admits, dispatches, and ends every request exactly once in one counted outcome."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

import grpc
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc

from cluster_core import event_log
from cluster_core.errors import (
    ClientFault,
    DeadlineError,
    OverloadedError,
    RachisError,
    SlowReaderError,
    WithdrawnError,
)
from cluster_core.ids import RequestId, new_request_id
from cluster_core.tenant_shares import Claimant
from cluster_wire import calls
from cluster_wire.calls import Context
from control_plane.access.roles import Identity
from control_plane.dispatch.choices import run_choices
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.fleet.first_worker import FirstWorker
from control_plane.intake import validation
from control_plane.intake.admission import Admission, Slot
from control_plane.intake.arrivals import Arrivals, expired
from control_plane.intake.prompt_memory import TOKEN_BYTES
from control_plane.intake.tokenization import Tokenizer
from control_plane.intake.turns import Turns
from control_plane.metrics.router_metrics import RouterMetrics
from control_plane.model.job import Job
from control_plane.model.lifecycle import Event, RequestLifecycle, State
from control_plane.model.memory_use import MemoryUse
from control_plane.model.prefix_scope import PrefixScope
from control_plane.model.request_trace import RequestTrace, TraceStage
from control_plane.sessions.serving import StreamingSessions

logger = logging.getLogger(__name__)

# What a client has of each choice.
_Received = Sequence[api.ReceivedAnswer]


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """The public service of one router."""

    def __init__(
        self,
        first_worker: FirstWorker,
        dispatcher: Dispatcher,
        admission: Admission,
        tokenizer: Tokenizer,
        sessions: StreamingSessions,
        metrics: RouterMetrics,
        arrivals: Arrivals,
    ) -> None:
        self._first_worker = first_worker
        self._dispatcher = dispatcher
        self._admission = admission
        self._tokenizer = tokenizer
        self._sessions = sessions
        self._metrics = metrics
        self._arrivals = arrivals
        self._turns = Turns()
        # How many requests and sessions have ended how.
        self.outcomes: Counter[State] = Counter()

    @property
    def open_sessions(self) -> int:
        return self._sessions.open_sessions

    def memory(self) -> tuple[MemoryUse, ...]:
        """Of the prompts that are here, and of the traces of those that were."""
        return self._admission.prompts.use(), self._arrivals.traces.memory()

    @property
    def waiting_for_first_worker(self) -> int:
        return self._first_worker.waiting

    async def Generate(  # type: ignore[override]  # it writes through the context, to bound each write
        self, request: api.GenerateRequest, context: Context
    ) -> None:
        await self._serve(request, (), context)

    async def Resume(  # type: ignore[override]  # as `Generate`
        self, request: api.ResumeRequest, context: Context
    ) -> None:
        await self._serve(request.request, request.received, context)

    async def _serve(self, request: api.GenerateRequest, received: _Received, context: Context) -> None:
        """received: of each choice; of what begins, nothing."""
        given = request.request_id
        request_id = RequestId(given) if validation.is_request_id(given) else new_request_id()
        async with self._counted(request_id, "resumed" if received else "request", context) as lifecycle:
            await self._turns.run(self._generate(request, received, context, lifecycle))

    async def GetIdentity(self, request: api.GetIdentityRequest, context: Context) -> api.GetIdentityResponse:
        access = self._arrivals.access
        try:
            caller = access.identity(context)
        except RachisError as error:
            # Its key was revoked since the door has looked.
            await calls.abort(context, error)
        return api.GetIdentityResponse(
            is_open=access.is_open,
            name=caller.name,
            tenant=caller.tenant,
            roles=sorted(caller.roles),
            lowest_priority=caller.lowest_priority,
        )

    async def ListModels(self, request: api.ListModelsRequest, context: Context) -> api.ListModelsResponse:
        try:
            model = self._first_worker.model_now()
        except RachisError as error:
            await calls.abort(context, error)
        served = api.ServedModel(
            name=model.name, tokenizer=model.tokenizer, max_model_len=model.max_model_len, imitates=model.imitates
        )
        adapters = sorted(self._arrivals.adapters.values(), key=lambda adapter: adapter.name)
        return api.ListModelsResponse(
            model=served, adapters=[api.ServedAdapter(name=each.name, path=each.path) for each in adapters]
        )

    async def StreamGenerate(  # type: ignore[override]  # it reads and writes through the context
        self, request_iterator: AsyncIterator[api.StreamGenerateRequest], context: Context
    ) -> None:
        async with self._counted(new_request_id(), "session", context) as lifecycle:
            await self._turns.run(self._sessions.serve(context, lifecycle))

    @asynccontextmanager
    async def _counted(self, request_id: RequestId, kind: str, context: Context) -> AsyncIterator[RequestLifecycle]:
        """Whatever ends the block ends the request, in one outcome, and becomes the call's status."""
        lifecycle = self._arrivals.begun(request_id, kind, context)
        event_log.about(request_id, f"{lifecycle.trace.trace_id:032x}")
        given_s = context.time_remaining()
        try:
            yield lifecycle
        except RachisError as error:
            _end(lifecycle, _left(context, given_s) if isinstance(error, WithdrawnError) else _event_of(error))
            self._metrics.failed(error.status)
            if isinstance(error, SlowReaderError):
                self._metrics.client_did_not_read()
            await calls.abort(context, error)
        except (asyncio.CancelledError, GeneratorExit):
            _end(lifecycle, _left(context, given_s))
            raise
        except Exception:
            logger.exception("it failed on a defect", extra={"request_id": lifecycle.request_id})
            _end(lifecycle, Event.FAULT)
            self._metrics.failed("INTERNAL")
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error, see the log for {lifecycle.request_id}")
        finally:
            self.outcomes[lifecycle.state] += 1
            self._metrics.request_ended(lifecycle.state.value)
            self._arrivals.traces.end(lifecycle)
            # A session's own id came with its first message, in another task.
            logger.info("%s %s", kind, lifecycle.state.value, extra={"request_id": lifecycle.request_id})

    async def _generate(
        self,
        request: api.GenerateRequest,
        received: _Received,
        context: Context,
        lifecycle: RequestLifecycle,
    ) -> None:
        trace, arrived_s = lifecycle.trace, lifecycle.trace.began_s
        # Text is there while it waits to be tokenized, and as long as its request.
        as_tokens, had = request.ByteSize() // TOKEN_BYTES, sum(len(each.token_ids) for each in received)
        caller = self._arrivals.access.identity(context)
        trace.tenant, trace.priority = caller.tenant, request.priority
        claimant = Claimant(request.priority, caller.tenant)
        with self._admission.prompts.holding(as_tokens + had, claimant) as held:
            self._arrivals.rates.begin(caller.tenant, resumed=bool(received))
            token_ids, scope = await self._checked(request, received, caller, trace)
            held.resize(max(as_tokens, len(token_ids)) + had)
            make_job = partial(
                self._arrivals.make_job,
                request_id=lifecycle.request_id,
                token_ids=token_ids,
                scope=scope,
                priority=request.priority,
                tenant=caller.tenant,
                share=self._arrivals.access.share(caller.tenant),
                arrived_s=arrived_s,
                deadline_s=arrived_s + self._arrivals.timeout_s(context.time_remaining()),
            )
            jobs = self._jobs(make_job, request, received, lifecycle)
            await self._answer(jobs, context, lifecycle)

    async def _answer(self, jobs: Sequence[Job], context: Context, lifecycle: RequestLifecycle) -> None:
        taken_s = self._arrivals.now_s()
        jobs[0].own_s = taken_s - jobs[0].arrived_s
        for job in jobs:
            job.lifecycle.trace.enter(TraceStage.ADMISSION, taken_s)
        async with self._slot(jobs) as slot:
            for job in jobs[1:]:
                job.lifecycle.trace.enter(TraceStage.FIRST_CHOICE, self._arrivals.now_s())
            for each in _lifecycles(lifecycle, jobs):
                each.at(Event.ADMITTED)
            # What is resumed had its first token elsewhere.
            answering = any(job.emitted for job in jobs)
            if answering:
                self._metrics.resumed()
            await calls.begin(context)
            async with aclosing(run_choices(self._dispatcher, jobs)) as pieces:  # type: ignore[type-var]
                async for choice, piece in pieces:
                    job, received_s = jobs[choice], self._arrivals.now_s()
                    if isinstance(piece, generation.Completion):
                        self._metrics.completed(piece, job.lifecycle.trace)
                        if not job.finish_reason:
                            slot.choice_ended()
                    elif not answering:
                        answering = True
                        self._metrics.first_token(job.first_token_s - job.arrived_s, lifecycle.trace)
                    response = api.GenerateResponse(request_id=job.request_id, choice=choice)
                    getattr(response, _FIELDS[type(piece).__name__]).CopyFrom(piece)
                    now_s = self._arrivals.now_s()
                    job.own_s += now_s - received_s
                    await self._send(context, response, job.remaining_s(now_s))
            if not lifecycle.ended:
                lifecycle.at(Event.ENDED)

    @asynccontextmanager
    async def _slot(self, jobs: Sequence[Job]) -> AsyncIterator[Slot]:
        """Held while the block runs, one for each choice that had not ended elsewhere. What the answers inside have
        taken is known at their end; a prompt that gets no slot costs its tenant nothing.

        Raises OverloadedError, DeadlineError.
        """
        claimant, prompt_tokens = Claimant(jobs[0].priority, jobs[0].tenant), len(jobs[0].token_ids)
        had_tokens = sum(len(job.emitted) for job in jobs)
        try:
            with self._arrivals.rates.waiting(claimant.tenant, prompt_tokens + had_tokens):
                async with asyncio.timeout(jobs[0].remaining_s(self._arrivals.now_s())):
                    expected = prompt_tokens + sum(job.max_tokens for job in jobs)
                    unfinished = sum(not job.finish_reason for job in jobs)
                    slot = await self._admission.take(claimant, expected, slots=max(1, unfinished))
        except TimeoutError:
            raise DeadlineError("the request's deadline passed while it waited for a place") from None
        try:
            yield slot
        finally:
            generated = sum(job.generated_tokens for job in jobs)
            self._arrivals.rates.spend(claimant.tenant, generated)
            slot.tokens = prompt_tokens + generated
            slot.release()

    def _jobs(
        self,
        make_job: Callable[..., Job],
        request: api.GenerateRequest,
        received: _Received,
        lifecycle: RequestLifecycle,
    ) -> list[Job]:
        """One for each choice. Of several each has a lifecycle of its own, beside that of the request."""
        jobs, choices = [], max(request.n, 1)
        for choice in range(choices):
            sampling = request.sampling
            if choice and sampling.HasField("seed"):
                sampling = generation.SamplingParams()
                sampling.CopyFrom(request.sampling)
                sampling.seed += choice
            own = lifecycle if choices == 1 else _of_choice(choice, lifecycle)
            job = make_job(sampling=sampling, lifecycle=own, may_be_refused=not (choice or received))
            if choice < len(received):
                job.resume(received[choice])
            jobs.append(job)
        return jobs

    async def _send(self, context: Context, response: api.GenerateResponse, remaining_s: float) -> None:
        """Raises SlowReaderError, DeadlineError where the request's own time ends first, WithdrawnError."""
        send_timeout_s = self._arrivals.send_timeout_s
        try:
            await calls.write(context, response, min(remaining_s, send_timeout_s))
        except SlowReaderError:
            if remaining_s < send_timeout_s:
                raise DeadlineError("the request's deadline passed while its answer was sent") from None
            raise

    async def _checked(
        self, request: api.GenerateRequest, received: _Received, caller: Identity, trace: RequestTrace
    ) -> tuple[list[int], PrefixScope]:
        """The prompt's tokens and their scope, after every check.

        Raises ClientFault, or UnavailableError where no worker is known.
        """
        model = await self._first_worker.model()
        validation.check_request_id(request.request_id)
        validation.check_cache_salt(request.cache_salt)
        validation.check_priority(request.priority, caller)
        adapter = validation.check_model(request.model, model.name, self._arrivals.adapters)
        validation.check_prompt_form(request.prompt, model)
        validation.check_sampling(request.sampling, model)
        validation.check_choices(request.n, request.sampling, received)
        for choice, answer in enumerate(received):
            validation.check_received(answer, request.sampling, model, adapter, f"received[{choice}]")
        await self._arrivals.grammars.check(request.sampling, model)
        trace.enter(TraceStage.TOKENIZATION, self._arrivals.now_s())
        token_ids = await self._tokenizer.token_ids(request.prompt)
        validation.check_tokens(token_ids, request.sampling, model)
        return token_ids, PrefixScope(self._arrivals.access.salt(caller, request.cache_salt), adapter)


def _lifecycles(lifecycle: RequestLifecycle, jobs: Sequence[Job]) -> list[RequestLifecycle]:
    """Each once: that of the request may be that of its only choice."""
    return list({id(each): each for each in (lifecycle, *(job.lifecycle for job in jobs))}.values())


def _of_choice(choice: int, lifecycle: RequestLifecycle) -> RequestLifecycle:
    """Of one of several; the first one's trace is the request's own."""
    trace = lifecycle.trace if choice == 0 else lifecycle.trace.another_choice()
    return RequestLifecycle(lifecycle.request_id, trace=trace)


_FIELDS = {"CompletionDelta": "delta", "Completion": "completion"}


def _event_of(error: RachisError) -> Event:
    if isinstance(error, SlowReaderError):
        return Event.CANCELLED
    if isinstance(error, DeadlineError):
        return Event.DEADLINE_PASSED
    return Event.REFUSED if isinstance(error, ClientFault | OverloadedError) else Event.FAULT


def _left(context: Context, given_s: float | None) -> Event:
    """Why a client is gone."""
    return Event.DEADLINE_PASSED if expired(given_s, context.time_remaining()) else Event.CANCELLED


def _end(lifecycle: RequestLifecycle, event: Event) -> None:
    if not lifecycle.ended:
        lifecycle.at(event)
