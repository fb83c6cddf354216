"""A session's prompt on its way to a prefill worker, in pieces.

Each attempt opens the session at its worker with the prompt as it stands, so a worker that is lost loses nothing: the
commands that waited for it are dropped, what they said is in the prompt. Commands are bounded by the backlog's limits.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from control_plane.dispatch.prefilling import names_of
from control_plane.fleet.worker_client import SessionCall, WorkerClient
from control_plane.model.job import Job
from control_plane.model.worker_snapshot import WorkerSnapshot
from control_plane.sessions.backlog import Backlog
from control_plane.sessions.session import Append, Command, Finish, Session, Update


class PromptInPieces:
    """See `control_plane.dispatch.prefilling.Prefilling`."""

    def __init__(
        self,
        client: WorkerClient,
        job: Job,
        session: Session,
        backlog: Backlog,
        on_change: Callable[[], None],
        now_s: Callable[[], float],
        hold_slot: Callable[[], Awaitable[None]],
    ) -> None:
        """on_change: called whenever the session or its backlog has changed. hold_slot: returns once there is one."""
        self._client = client
        self._job = job
        self._session = session
        self._backlog = backlog
        self._on_change = on_change
        self._now_s = now_s
        self._hold_slot = hold_slot
        self._commands: deque[Command] = deque()
        self._to_send = asyncio.Event()
        self._whole = asyncio.Event()
        # A worker has the session, or none will.
        self.placed = asyncio.Event()
        # The worker that had it first.
        self.worker_id = ""
        # When the prompt was complete.
        self.finished_s = 0.0
        # The worker's, once it has prefilled.
        self.record: generation.SessionRecord | None = None

    @property
    def is_whole(self) -> bool:
        return self._session.finished

    def send(self, command: Command | None) -> None:
        """The session took in what this command says, in this turn of the loop: no worker was given it meanwhile."""
        if isinstance(command, Finish):
            self.finished_s = self._now_s()
            self._job.lifecycle.trace.input_finished(self.finished_s)
            self._whole.set()
        if command is not None and self._backlog.attached:
            self._commands.append(command)
            self._to_send.set()
            if not isinstance(command, Finish):
                self._backlog.sent(len(self._session.tokens), len(command.token_ids))
        self._on_change()

    async def may_go_on(self) -> None:
        """A session that no worker has accepted yet was admitted when it was opened: its client has not heard of it."""
        if self.placed.is_set():
            await self._hold_slot()

    async def attempt(self, worker: WorkerSnapshot, request_id: str, *, hand_off: bool) -> wire.PrefillResponse:
        opening = wire.PrefillSessionOpen(
            request_id=request_id,
            generation=worker.generation,
            mode=self._session.mode,
            token_ids=self._session.tokens,
            sampling=self._job.sampling,
            hand_off=hand_off,
            cache_salt=self._job.scope.cache_salt,
            adapter=self._job.scope.adapter,
            priority=self._job.priority,
            named=names_of(self._job),
            tenant=self._job.share,
        )
        self._attach()
        try:
            async with self._client.prefill_session(worker, self._job.remaining_s(self._now_s())) as call:
                response = await self._converse(call, wire.PrefillSessionRequest(open=opening), worker)
            self._backlog.completed(response.session, self._session)
            self.record = response.session
            return response
        finally:
            self._backlog.detach()
            self._on_change()

    async def without_worker(self) -> None:
        self._backlog.put_off()
        self.placed.set()
        self._on_change()
        await self._whole.wait()

    def _attach(self) -> None:
        self._commands.clear()
        if self._session.finished:
            self._commands.append(Finish(()))
        self._backlog.attach(len(self._session.tokens))
        self._on_change()

    async def _converse(
        self, call: SessionCall, opening: wire.PrefillSessionRequest, worker: WorkerSnapshot
    ) -> wire.PrefillResponse:
        """One task writes while this one reads. No TaskGroup: see `Ungrouped`."""
        sender = asyncio.create_task(self._send_all(call, opening))
        try:
            return await self._first_token(call, worker)
        finally:
            sender.cancel()
            await asyncio.wait({sender})

    async def _send_all(self, call: SessionCall, opening: wire.PrefillSessionRequest) -> None:
        """Until it is cancelled, or the call has ended: who reads hears why."""
        if not await call.write(opening):
            return
        while True:
            while self._commands:
                if not await call.write(_to_wire(self._commands.popleft())):
                    return
            self._to_send.clear()
            await self._to_send.wait()

    async def _first_token(self, call: SessionCall, worker: WorkerSnapshot) -> wire.PrefillResponse:
        while (response := await call.read()).HasField("progress"):
            if not self.placed.is_set():
                # A worker tells at once where the session stands: so it has taken it.
                self.worker_id = worker.worker_id
                self.placed.set()
            self._backlog.progressed(response.progress)
            self._on_change()
        return response.prefilled


def _to_wire(command: Command) -> wire.PrefillSessionRequest:
    match command:
        case Append(token_ids):
            return wire.PrefillSessionRequest(append=wire.PrefillSessionAppend(token_ids=token_ids))
        case Update(keep_tokens, token_ids):
            update = wire.PrefillSessionUpdate(keep_tokens=keep_tokens, token_ids=token_ids)
            return wire.PrefillSessionRequest(update=update)
        case Finish(token_ids):
            return wire.PrefillSessionRequest(finish=wire.PrefillSessionFinish(token_ids=token_ids))
