"""The way of a request through the simulated pools, in the order of `control_plane.dispatch.dispatcher`.

Placement, lifecycle and in-flight counts are the router's own classes; calls to workers are events that take `hop_s`.
Who holds what:
    worker's in-flight count    from the call to a worker until that call has ended (`Attempt`)
    prompt's blocks             the prefill engine, from its first step until the pull has landed or the request is over
A request that loses its worker tries another one: its prefill as often as the router may, its decode once more and only
before it has answered; the prompt is then computed where it decodes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from rachis.v1 import worker_pb2 as wire

from cluster_sim.engine import Outcome, OutcomeKind, SimInput, SimJob
from cluster_sim.events import EventQueue
from cluster_sim.figures import Figures
from cluster_sim.network import Network
from cluster_sim.request import Attempt, Traveller
from cluster_sim.worker import SimWorker
from cluster_sim.workloads import SimRequest
from control_plane.fleet.membership import Membership
from control_plane.model.lifecycle import Event, State
from control_plane.model.worker_snapshot import Pool, WorkerSnapshot
from control_plane.placement.disaggregation import LOCAL
from control_plane.placement.placer import Placer

_DECODE_ATTEMPTS = 2
_ASK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """hop_s: of one message between router and worker. worker_wait_s: how long a request waits for a decode worker.
    timeout_s: how long it may take in all. handoff_deadline_s: from the end of its prefill on, until when its KV has to
    be pulled; later it is computed again. warm_up_s: who arrives before is served, and not measured."""

    hop_s: float = 0.0005
    prefill_attempts: int = 2
    worker_wait_s: float = 30.0
    timeout_s: float = 600.0
    handoff_deadline_s: float = 15.0
    warm_up_s: float = 0.0


class SimDispatcher:
    """Runs requests; `figures` tells what came of them."""

    def __init__(
        self,
        events: EventQueue,
        membership: Membership,
        placer: Placer,
        network: Network,
        settings: DispatchSettings,
        figures: Figures,
        kv_bytes_per_token: int,
        worker_of: Callable[[str], SimWorker],
    ) -> None:
        self._events = events
        self._membership = membership
        self._placer = placer
        self._network = network
        self._settings = settings
        self._figures = figures
        self._kv_bytes_per_token = kv_bytes_per_token
        self._worker_of = worker_of
        self._numbers = count(1)
        # By the engine's name for it: who runs there, and as what.
        self._running: dict[int, tuple[Traveller, Pool]] = {}
        self._open: dict[int, Traveller] = {}

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def arrive(self, number: int, request: SimRequest) -> None:
        now_s = self._events.now_s
        self._figures.arrivals.add(now_s, 1)
        self._figures.prompt_tokens += request.prompt_tokens
        traveller = self._open[number] = Traveller.of(number, request, self._settings.timeout_s)
        traveller.job.lifecycle.at(Event.ADMITTED)
        self._events.at(traveller.job.deadline_s, lambda: self._expire(number))
        for after_s, following in request.inputs[1:]:
            self._events.after(after_s, partial(self._input, traveller, following))
        if self._placer.weigh(traveller.job, is_whole=traveller.is_whole) in LOCAL:
            self._decode_alone(traveller)
        else:
            self._prefill(traveller)

    def outcome(self, worker: SimWorker, outcome: Outcome) -> None:
        """What an engine tells."""
        found = self._running.get(outcome.job.number)
        if found is None:
            return
        traveller, pool = found
        if outcome.kind is OutcomeKind.REFUSED:
            self._end(traveller, Event.REFUSED)
        elif outcome.kind is OutcomeKind.PULLS:
            self._pull(traveller, worker, outcome)
        elif pool == wire.POOL_PREFILL:
            if outcome.kind is OutcomeKind.FINISHED:
                self._events.after(self._settings.hop_s, lambda: self._prefilled(traveller, outcome.job.number))
        elif outcome.kind is OutcomeKind.FIRST_TOKEN:
            self._events.after(self._settings.hop_s, lambda: self._started(traveller, outcome.job.number))
        else:
            self._events.after(self._settings.hop_s, lambda: self._finished(traveller, outcome.job.number))

    def lost(self, worker: SimWorker) -> None:
        """The worker is gone; whoever it ran for hears of it."""
        for number, (traveller, pool) in list(self._running.items()):
            attempt = traveller.prefill if pool == wire.POOL_PREFILL else traveller.decode
            if attempt is not None and attempt.number == number and attempt.worker is worker:
                self._lost(traveller, pool)

    # Prefill.

    def _prefill(self, traveller: Traveller) -> None:
        job = traveller.job
        placement = None
        if traveller.prefill_attempts < self._settings.prefill_attempts:
            placement = self._placer.place(job, wire.POOL_PREFILL, frozenset(traveller.excluded))
        pull_is_near = traveller.request.output_tokens > 1 and traveller.session is None
        if placement is None or (pull_is_near and not self._membership.usable(wire.POOL_DECODE)):
            self._decode_alone(traveller)
            return
        traveller.prefill_attempts += 1
        job.lifecycle.at(Event.PLACED)
        worker = self._worker_of(placement.worker.worker_id)
        request = traveller.request
        answers = min(1, request.output_tokens)
        sim_job = SimJob(
            next(self._numbers), request.prompt_tokens, request.keys, answers,
            hand_off=request.output_tokens > 1, tenant=request.tenant,
        )  # fmt: skip
        attempt = Attempt.begin(sim_job.number, worker, self._placer.in_flight(placement))
        traveller.prefill = attempt
        session = traveller.session
        begin = (
            (lambda: worker.add(sim_job))
            if session is None
            else (lambda: worker.open(sim_job, replace(session, replaces=False), request.mode))
        )
        self._call(traveller, attempt, wire.POOL_PREFILL, placement.worker, begin)

    def _input(self, traveller: Traveller, following: SimInput) -> None:
        """The next piece of a session's prompt."""
        if traveller.job.lifecycle.ended:
            return
        traveller.take(following)
        attempt = traveller.prefill
        if attempt is not None:
            worker, number = attempt.worker, attempt.number
            self._events.after(self._settings.hop_s, lambda: worker.take_input(number, following))
        elif traveller.alone and traveller.is_whole:
            self._decode_alone(traveller)

    def _prefilled(self, traveller: Traveller, number: int) -> None:
        attempt = traveller.prefill
        if attempt is None or attempt.number != number:
            return
        attempt.end()
        self._placer.keep(traveller.job)
        self._first_token(traveller)
        if traveller.request.output_tokens <= 1:
            self._end(traveller, Event.ENDED)
            return
        traveller.job.lifecycle.at(Event.FIRST_TOKEN)
        traveller.excluded.clear()
        self._events.after(self._settings.handoff_deadline_s, lambda: self._late(traveller, attempt))
        self._decode(traveller, self._events.now_s)

    def _late(self, traveller: Traveller, attempt: Attempt) -> None:
        """Nobody pulls any more what the prefill worker keeps."""
        if traveller.prefill is not attempt:
            return
        self._give_back_prefill(traveller)
        if traveller.transfer is not None:
            traveller.transfer.cancel()
            traveller.transfer = None
            self._recompute(traveller)

    # Decode.

    def _decode_alone(self, traveller: Traveller) -> None:
        if not traveller.is_whole:
            traveller.alone = True
            return
        self._figures.local_prefills += 1
        self._placer.keep(traveller.job)
        traveller.job.lifecycle.at(Event.PLACED_DECODE_ONLY)
        traveller.excluded.clear()
        self._decode(traveller, self._events.now_s)

    def _decode(self, traveller: Traveller, since_s: float) -> None:
        """On the best worker there is, once there is one."""
        if traveller.job.lifecycle.ended or traveller.decode is not None:
            return
        pulls = traveller.prefill is not None and traveller.decode_attempts == 0
        placement = self._placer.place(
            traveller.job, wire.POOL_DECODE, frozenset(traveller.excluded), prefills=not pulls
        )
        if placement is None:
            if self._events.now_s - since_s > self._settings.worker_wait_s:
                self._end(traveller, Event.FAULT)
            else:
                self._events.after(_ASK_AGAIN_S, lambda: self._decode(traveller, since_s))
            return
        traveller.decode_attempts += 1
        self._send_to_decode(traveller, placement.worker, self._placer.in_flight(placement), pulls=pulls)

    def _send_to_decode(self, traveller, snapshot, counted, *, pulls: bool) -> None:  # type: ignore[no-untyped-def]
        request = traveller.request
        job = SimJob(
            next(self._numbers), request.prompt_tokens, request.keys, request.output_tokens,
            pulls=pulls, tenant=request.tenant,
        )  # fmt: skip
        attempt = Attempt.begin(job.number, self._worker_of(snapshot.worker_id), counted)
        traveller.decode = attempt
        self._call(traveller, attempt, wire.POOL_DECODE, snapshot, lambda: attempt.worker.add(job))

    def _pull(self, traveller: Traveller, worker: SimWorker, outcome: Outcome) -> None:
        """The decode worker has room for the prompt's KV."""
        source, number = traveller.prefill, outcome.job.number
        traveller.pull_asked_s = self._events.now_s
        if source is None:
            self._recompute(traveller)
            return

        def landed() -> None:
            traveller.transfer = None
            self._figures.transfer_s.add(self._events.now_s - traveller.pull_asked_s)
            self._give_back_prefill(traveller)
            worker.landed(number)

        size = outcome.tokens * self._kv_bytes_per_token
        self._figures.transferred_bytes += size
        traveller.transfer = self._network.start(source.worker.egress, worker.ingress, size, landed)

    def _recompute(self, traveller: Traveller) -> None:
        """The prompt's KV is gone: the decode worker computes it, in the call that it has got."""
        attempt = traveller.decode
        assert attempt is not None
        self._figures.retries += 1
        self._running.pop(attempt.number, None)
        attempt.worker.abort(attempt.number)
        request = traveller.request
        job = SimJob(
            next(self._numbers), request.prompt_tokens, request.keys, request.output_tokens, tenant=request.tenant
        )
        attempt.number = job.number
        self._running[job.number] = (traveller, wire.POOL_DECODE)
        attempt.worker.add(job)

    def _started(self, traveller: Traveller, number: int) -> None:
        if traveller.decode is None or traveller.decode.number != number or traveller.job.lifecycle.ended:
            return
        traveller.decode.flight.prefilled()
        traveller.started = True
        self._give_back_prefill(traveller)
        traveller.job.lifecycle.at(Event.DECODE_STARTED)
        if traveller.first_token_s is None:
            self._first_token(traveller)

    def _finished(self, traveller: Traveller, number: int) -> None:
        if traveller.decode is not None and traveller.decode.number == number:
            self._end(traveller, Event.ENDED)

    # Calls, and their ends.

    def _call(
        self,
        traveller: Traveller,
        attempt: Attempt,
        pool: Pool,
        snapshot: WorkerSnapshot,
        begin: Callable[[], bool],
    ) -> None:
        """begin: at the worker; False where nobody answers."""
        number = attempt.number
        self._running[number] = (traveller, pool)

        def arrive() -> None:
            if number in self._running and not (attempt.worker.generation == snapshot.generation and begin()):
                self._lost(traveller, pool)

        self._events.after(self._settings.hop_s, arrive)

    def _lost(self, traveller: Traveller, pool: Pool) -> None:
        """The worker does not answer."""
        now_s = self._events.now_s
        attempt = traveller.prefill if pool == wire.POOL_PREFILL else traveller.decode
        assert attempt is not None
        self._running.pop(attempt.number, None)
        snapshot = self._snapshot(attempt.worker)
        if pool == wire.POOL_PREFILL and attempt.counted is None:
            # It had prefilled: what it kept cannot be pulled any more.
            traveller.prefill = None
            if traveller.transfer is not None:
                traveller.transfer.cancel()
                traveller.transfer = None
                self._recompute(traveller)
            return
        attempt.end()
        if snapshot is not None:
            self._membership.suspect(snapshot, now_s)
            traveller.excluded.add((snapshot.worker_id, snapshot.generation))
        self._figures.retries += 1
        if pool == wire.POOL_PREFILL:
            traveller.prefill = None
            traveller.job.lifecycle.at(Event.WORKER_LOST)
            self._prefill(traveller)
            return
        traveller.decode = None
        if traveller.transfer is not None:
            traveller.transfer.cancel()
            traveller.transfer = None
        if traveller.started or traveller.decode_attempts >= _DECODE_ATTEMPTS:
            self._end(traveller, Event.FAULT)
            return
        traveller.job.lifecycle.at(Event.WORKER_LOST)
        self._decode(traveller, now_s)

    def _first_token(self, traveller: Traveller) -> None:
        now_s = self._events.now_s
        traveller.first_token_s = now_s
        if not self._is_measured(traveller):
            return
        self._figures.ttft_s.add(now_s - traveller.request.complete_s)
        if traveller.session is not None:
            self._figures.ttft_open_s.add(now_s - traveller.request.arrival_s)

    def _expire(self, number: int) -> None:
        traveller = self._open.get(number)
        if traveller is not None:
            self._end(traveller, Event.DEADLINE_PASSED)

    def _end(self, traveller: Traveller, event: Event) -> None:
        """The request's one outcome; nothing of it is left anywhere."""
        if traveller.job.lifecycle.ended:
            return
        state = traveller.job.lifecycle.at(event)
        del self._open[traveller.number]
        if traveller.transfer is not None:
            traveller.transfer.cancel()
        self._give_back_prefill(traveller)
        decode = traveller.decode
        if decode is not None:
            self._running.pop(decode.number, None)
            decode.end()
            if state is not State.FINISHED:
                decode.worker.abort(decode.number)
        self._count(traveller, state)

    def _give_back_prefill(self, traveller: Traveller) -> None:
        attempt, traveller.prefill = traveller.prefill, None
        if attempt is None:
            return
        is_running = attempt.counted is not None
        self._running.pop(attempt.number, None)
        attempt.end()
        if is_running:
            attempt.worker.abort(attempt.number)
        else:
            attempt.worker.release(attempt.number)

    def _count(self, traveller: Traveller, state: State) -> None:
        figures, now_s = self._figures, self._events.now_s
        figures.outcomes[state.value] = figures.outcomes.get(state.value, 0) + 1
        figures.completions.add(now_s, 1)
        figures.duration_s = now_s
        if not self._is_measured(traveller):
            return
        figures.measured += 1
        if state is not State.FINISHED or traveller.first_token_s is None:
            return
        request = traveller.request
        ttft_s = traveller.first_token_s - request.complete_s
        later = request.output_tokens - 1
        tpot_s = (now_s - traveller.first_token_s) / later if later > 0 else 0.0
        if later > 0:
            figures.tpot_s.add(tpot_s)
        figures.e2e_s.add(now_s - request.complete_s)
        figures.generated_tokens += request.output_tokens
        within_ttft = not figures.slo_ttft_s or ttft_s <= figures.slo_ttft_s
        within_tpot = not figures.slo_tpot_s or tpot_s <= figures.slo_tpot_s
        figures.attained += within_ttft and within_tpot

    def _is_measured(self, traveller: Traveller) -> bool:
        return traveller.request.arrival_s >= self._settings.warm_up_s

    def _snapshot(self, worker: SimWorker) -> WorkerSnapshot | None:
        """As the router knows it."""
        member = self._membership.get(worker.name)
        if member is None:
            return None
        record = member.registration
        return WorkerSnapshot(member.worker_id, record.generation, record.pool, record.address)

    def travellers(self) -> Iterator[Traveller]:
        """Requests that have no outcome yet."""
        return iter(self._open.values())
