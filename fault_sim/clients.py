"""The clients of one run: each sends one request as planned and notes what it gets.

What a client does when its router is gone is `rachis.lost_routers`, as for every client of ours.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from rachis.conventions import next_message
from rachis.lost_routers import LostRouters, Received
from rachis.routers import is_lost
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc

from cluster_core.engine_jobs import SamplingSpec
from fault_sim.plan import Request

Trace = Callable[[str], None]
# The stub of a router: of the first that is asked, the second, and so on.
Routers = Callable[[int], "router_pb2_grpc.RouterServiceAsyncStub"]

_RECONNECT_S = 0.2


@dataclass(slots=True)
class Answer:
    """code: of the call; empty while it runs. prompt: as it was at the end. sampling: what the client asked for.

    completions: how often it was told that the answer is complete, and completion_tokens how long it was said to be.
    """

    request: Request
    prompt: list[int]
    sampling: SamplingSpec
    code: str = ""
    details: str = ""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    completions: int = 0
    completion_tokens: int = 0
    handoff: str = ""
    migrations: int = 0
    resumes: int = 0
    refusals: list[str] = field(default_factory=list)
    late_events: int = 0
    is_finished: bool = False

    @property
    def name(self) -> str:
        return f"request-{self.request.number}"


class Client:
    """`run` once; `answer` is filled in meanwhile."""

    def __init__(self, request: Request, routers: Routers, trace: Trace) -> None:
        sampling = SamplingSpec(
            max_tokens=request.max_tokens, temperature=0.0 if request.seed is None else 1.0, seed=request.seed
        )
        self.answer = Answer(request, list(request.prompt), sampling)
        self._head = len(request.prompt)
        self._request = request
        self._routers = routers
        self._trace = trace
        self._pause_s = request.pause_s or 0.0
        self._received = Received()
        self._lost = LostRouters()
        # What a session has sent after its opening.
        self._sent: list[api.StreamGenerateRequest] = []
        self._until_s: float | None = None
        self._call: Any = None
        self._has_left = False

    async def run(self) -> None:
        request, answer, loop = self._request, self.answer, asyncio.get_running_loop()
        self._trace(f"{answer.name} calls")
        self._until_s = None if request.timeout_s is None else loop.time() + request.timeout_s
        leaving = None if request.cancel_s is None else loop.call_later(request.cancel_s, self._leave)
        try:
            while await self._ask():
                self._trace(f"{answer.name} asks another router after {len(self._received)} tokens")
                answer.resumes += bool(self._received)
                await asyncio.sleep(_RECONNECT_S)
        finally:
            if leaving is not None:
                leaving.cancel()
        self._trace(f"{answer.name} ends {answer.code} {answer.details}")

    def _leave(self) -> None:
        self._has_left = True
        self._call.cancel()

    async def _ask(self) -> bool:
        """One router. Returns whether it was gone, and another one is asked."""
        answer = self.answer
        router = self._routers(self._lost.lost)
        self._call = call = self._session(router) if self._request.moves else self._generate(router)
        if self._has_left:
            call.cancel()
        sending = asyncio.create_task(self._send(call)) if self._request.moves else None
        try:
            while (event := await next_message(call)) is not None:
                self._note(event)
                await self._pause()
            answer.code = "OK"
        except grpc.aio.AioRpcError as error:
            if answer.completions:
                answer.code = "OK"
            elif is_lost(error) and self._lost.may_go_on(len(self._received), asyncio.get_running_loop().time()):
                return True
            else:
                answer.code, answer.details = error.code().name, error.details() or ""
        except asyncio.CancelledError:
            if not self._has_left:
                call.cancel()
                raise
            answer.code = "CANCELLED"
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.wait({sending})
        return False

    def _left_s(self) -> float | None:
        return None if self._until_s is None else max(0.0, self._until_s - asyncio.get_running_loop().time())

    def _generate(self, router: "router_pb2_grpc.RouterServiceAsyncStub") -> Any:
        request = api.GenerateRequest(
            prompt=_tokens(self.answer.prompt),
            sampling=self._sampling(),
            request_id=self.answer.name,
            cache_salt=self._request.salt,
        )
        if not self._received:
            return router.Generate(request, timeout=self._left_s())
        resume = api.ResumeRequest(request=request, received=[self._received.to_wire()])
        return router.Resume(resume, timeout=self._left_s())

    def _session(self, router: "router_pb2_grpc.RouterServiceAsyncStub") -> Any:
        return router.StreamGenerate(timeout=self._left_s())  # type: ignore[call-arg]  # it is written to

    async def _send(self, call: Any) -> None:
        """Until the call has ended, which its reader learns. What another router has been told comes first."""
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError, asyncio.CancelledError):
            opened = api.SessionOpen(
                mode=generation.SessionMode.Value(f"SESSION_MODE_{self._request.mode}"),
                prefix=_tokens(self._request.prompt),
                sampling=self._sampling(),
                request_id=self.answer.name,
                cache_salt=self._request.salt,
                received=self._received.to_wire(),
            )
            await call.write(api.StreamGenerateRequest(open=opened))
            for message in self._told():
                await call.write(message)
            for number in range(len(self._sent), len(self._request.moves)):
                move = self._request.moves[number]
                await asyncio.sleep(move.after_s)
                if move.kind == "close":
                    await call.done_writing()
                    return
                self._sent.append(self._message(number))
                await call.write(self._sent[-1])

    def _told(self) -> list[api.StreamGenerateRequest]:
        """What another router has to be told."""
        return list(self._sent)

    def _message(self, number: int) -> api.StreamGenerateRequest:
        """The next message; the prompt is changed as it says."""
        move, piece, answer = self._request.moves[number], self._request.piece(number), self.answer
        match move.kind:
            case "append":
                answer.prompt += piece
                return api.StreamGenerateRequest(append=api.SessionAppend(piece=_piece(piece)))
            case "update":
                context = answer.prompt[self._head :][: move.keep]
                answer.prompt[self._head :] = context + piece
                pieces = [_piece(part) for part in (context, piece) if part]
                return api.StreamGenerateRequest(update=api.SessionUpdate(revision=number, context=pieces))
            case "finish":
                answer.is_finished = True
                return api.StreamGenerateRequest(finish=api.SessionFinish())
            case _:
                return api.StreamGenerateRequest(cancel=api.SessionCancel())

    def _note(self, event: api.GenerateResponse | api.StreamGenerateResponse) -> None:
        kind, answer = event.WhichOneof("event"), self.answer
        if kind != "progress":
            self._trace(f"{answer.name} hears {kind}")
        if answer.completions:
            answer.late_events += 1
        if kind == "completion":
            answer.completions += 1
            answer.completion_tokens = event.completion.usage.completion_tokens
            answer.migrations = event.completion.route.migrations
            answer.handoff = generation.HandoffOutcome.Name(event.completion.route.handoff)
        elif kind == "delta":
            self._take(event.delta)
        elif isinstance(event, api.StreamGenerateResponse):
            if kind == "first_token":
                self._take(event.first_token.delta)
            elif kind == "refused":
                answer.refusals.append(event.refused.message)

    async def _pause(self) -> None:
        """Once, after its first token."""
        if self.answer.tokens and self._pause_s:
            pause_s, self._pause_s = self._pause_s, 0.0
            self._trace(f"{self.answer.name} reads nothing for {pause_s:g} s")
            await asyncio.sleep(pause_s)

    def _take(self, delta: generation.CompletionDelta) -> None:
        self._received.add(delta)
        self.answer.tokens += delta.token_ids
        self.answer.text += delta.text

    def _sampling(self) -> generation.SamplingParams:
        spec = self.answer.sampling
        return generation.SamplingParams(max_tokens=spec.max_tokens, temperature=spec.temperature, seed=spec.seed)


def _tokens(ids: list[int]) -> generation.PromptInput:
    return generation.PromptInput(token_ids=generation.TokenIds(ids=ids))


def _piece(ids: list[int]) -> api.SessionPiece:
    return api.SessionPiece(token_ids=generation.TokenIds(ids=ids))
