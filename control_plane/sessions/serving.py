"""Serves streaming sessions: reads and checks `open`, admits the session, and lets it run (`session_run`).

An admission slot is held while the session has work (`places`), and one deadline ends it wherever it is.
"""

import asyncio

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import StreamingSection
from cluster_core import event_log
from cluster_core.errors import DeadlineError, InvalidInputError
from cluster_core.ids import RequestId
from cluster_core.tenant_shares import Claimant
from cluster_wire import calls
from cluster_wire.calls import Context
from control_plane.access.roles import Identity
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.fleet.first_worker import FirstWorker
from control_plane.fleet.worker_client import WorkerClient
from control_plane.intake import validation
from control_plane.intake.admission import Admission
from control_plane.intake.arrivals import Arrivals
from control_plane.intake.malformed_input import Malformed
from control_plane.intake.prompt_memory import TOKEN_BYTES, HeldPrompt
from control_plane.intake.tokenization import Tokenizer
from control_plane.metrics.router_metrics import RouterMetrics
from control_plane.model.job import Job
from control_plane.model.lifecycle import Event, RequestLifecycle
from control_plane.model.limits import max_tokens_of
from control_plane.model.prefix_scope import PrefixScope
from control_plane.model.request_trace import TraceStage
from control_plane.sessions.backlog import Backlog
from control_plane.sessions.changes import SessionChanges
from control_plane.sessions.events import SessionEvents
from control_plane.sessions.intake import SessionIntake
from control_plane.sessions.places import OpenSessions, SessionSlot
from control_plane.sessions.prefill import PromptInPieces
from control_plane.sessions.reader import SessionReader, next_message
from control_plane.sessions.run import SessionRun
from control_plane.sessions.session import Change, Input, Session


class StreamingSessions:
    """All sessions of one router."""

    def __init__(
        self,
        first_worker: FirstWorker,
        dispatcher: Dispatcher,
        client: WorkerClient,
        admission: Admission,
        tokenizer: Tokenizer,
        settings: StreamingSection,
        metrics: RouterMetrics,
        arrivals: Arrivals,
    ) -> None:
        self._first_worker = first_worker
        self._dispatcher = dispatcher
        self._client = client
        self._admission = admission
        self._tokenizer = tokenizer
        self._settings = settings
        self._metrics = metrics
        self._arrivals = arrivals
        self._open = OpenSessions(settings.max_open_sessions, settings.max_client_sessions)

    @property
    def open_sessions(self) -> int:
        return len(self._open)

    async def serve(self, context: Context, lifecycle: RequestLifecycle) -> None:
        """One session, from its first message to its completion.

        Raises what refuses it, OverloadedError where too many are open, WithdrawnError when its client takes it back,
        DeadlineError, UnavailableError.
        """
        caller = self._arrivals.access.identity(context)
        with self._open.one_more(context.peer(), caller.tenant), self._admission.prompts.holding() as held:
            await self._serve(context, caller, lifecycle, held)

    async def _serve(self, context: Context, caller: Identity, lifecycle: RequestLifecycle, held: HeldPrompt) -> None:
        timeout_s = self._arrivals.timeout_s(context.time_remaining())
        called_s = self._arrivals.now_s()
        opened = await self._open_message(context, min(timeout_s, self._settings.open_timeout_s))
        # `open` is what arrives; a client may call long before.
        arrived_s = self._arrivals.now_s()
        if validation.is_request_id(opened.request_id):
            lifecycle.request_id = RequestId(opened.request_id)
        trace = lifecycle.trace
        event_log.about(lifecycle.request_id, f"{trace.trace_id:032x}")
        trace.begin(arrived_s)
        trace.tenant, trace.priority = caller.tenant, opened.priority
        claimant = Claimant(opened.priority, caller.tenant)
        held.belongs_to(claimant)
        held.resize(opened.ByteSize() // TOKEN_BYTES)
        model = await self._first_worker.model()
        self._arrivals.rates.begin(caller.tenant, resumed=bool(opened.received.token_ids))
        adapter = validation.check_session_open(opened, caller, model, self._arrivals.adapters)
        trace.enter(TraceStage.TOKENIZATION, self._arrivals.now_s())
        session = await self._session(opened, model)
        brought = len(session.tokens) + len(opened.received.token_ids)
        held.resize(brought)
        job = self._arrivals.make_job(
            request_id=lifecycle.request_id,
            token_ids=session.tokens,
            sampling=opened.sampling,
            scope=PrefixScope(self._arrivals.access.salt(caller, opened.cache_salt), adapter),
            priority=opened.priority,
            tenant=caller.tenant,
            share=self._arrivals.access.share(caller.tenant),
            lifecycle=lifecycle,
            arrived_s=arrived_s,
            deadline_s=called_s + timeout_s,
            prompt_changes=True,
        )
        job.resume(opened.received)
        taken_s = self._arrivals.now_s()
        job.own_s = taken_s - arrived_s
        trace.enter(TraceStage.ADMISSION, taken_s)
        slot = SessionSlot(self._admission, claimant)
        try:
            async with asyncio.timeout(job.remaining_s(taken_s)):
                await self._hold(slot, caller.tenant, brought)
                lifecycle.at(Event.ADMITTED)
                if job.emitted:
                    # It waits for its input to come again.
                    trace.enter(TraceStage.INPUT, self._arrivals.now_s())
                    self._metrics.resumed()
                await calls.begin(context)
                await self._run(context, opened, model, session, job, slot, held).serve(self._dispatcher)
        except TimeoutError:
            raise DeadlineError("the session's deadline passed") from None
        finally:
            slot.give_back(job.generated_tokens)
            self._arrivals.rates.spend(caller.tenant, job.generated_tokens)

    async def _hold(self, slot: SessionSlot, tenant: str, tokens: int) -> None:
        """What came costs its tenant nothing where the session gets no slot for it. Raises OverloadedError."""
        with self._arrivals.rates.waiting(tenant, tokens):
            await slot.hold(tokens)

    async def _open_message(self, context: Context, timeout_s: float) -> api.SessionOpen:
        message = await next_message(context, timeout_s, "streaming.open_timeout_s")
        if isinstance(message, Malformed):
            raise message.error
        if message is None or not message.HasField("open"):
            raise InvalidInputError("the first message must be `open`", field="open")
        return message.open

    async def _session(self, opened: api.SessionOpen, model: wire.ModelInfo) -> Session:
        await self._arrivals.grammars.check(opened.sampling, model, "open.")
        frame = await self._tokenizer.frame(opened.prefix)
        room = model.max_model_len - max_tokens_of(opened.sampling)
        return Session(opened.mode, frame.head, frame.tail, max_prompt_tokens=room)

    def _run(
        self,
        context: Context,
        opened: api.SessionOpen,
        model: wire.ModelInfo,
        session: Session,
        job: Job,
        slot: SessionSlot,
        held: HeldPrompt,
    ) -> SessionRun:
        settings = self._settings
        replaces = opened.mode == generation.SESSION_MODE_UPDATE
        backlog = Backlog(settings.max_unapplied_inputs, settings.max_backlog_tokens, replaces)
        changes = SessionChanges(session, backlog, slot.give_back)
        pieces = PromptInPieces(
            self._client, job, session, backlog, changes.note, self._arrivals.now_s, slot.hold_again
        )
        events = SessionEvents(context, job, pieces, self._metrics, self._arrivals.send_timeout_s)

        async def admit(change: Change) -> None:
            computes = change.kind is Input.FINISH if backlog.is_put_off else change.command is not None
            if computes:
                await self._hold(slot, job.tenant, change.new_tokens)
            else:
                self._arrivals.rates.spend(job.tenant, change.new_tokens)

        intake = SessionIntake(session, opened, self._tokenizer, model, held, admit)
        reader = SessionReader(
            context, intake, changes.room, pieces.send, events.refused, idle_timeout_s=settings.idle_timeout_s
        )
        interval_s = settings.progress_interval_ms / 1000
        return SessionRun(job, session, backlog, pieces, events, reader, changes.news, progress_interval_s=interval_s)
