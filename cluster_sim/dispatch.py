"""Carries out journeys in simulated time: the driver of `control_plane.dispatch.journey` over simulated workers.

Placement, membership and the journey are the router's own; calls to workers are events that take `hop_s`. What is
modelled here is the workers' and the network's side of a call:
    worker's in-flight count    from the call to a worker until that call has ended (`Attempt`)
    prompt's blocks             the prefill engine, until the pull has landed, the lease is released, or has expired
    a pull that breaks off      the decode worker computes the prompt, in the call that it has
    an answer that goes on      is generated anew: engines here do not tell how far they were
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import OverloadedError
from cluster_sim.dispatch_settings import DispatchSettings
from cluster_sim.engines.engine import Outcome, OutcomeKind, SimInput, SimJob
from cluster_sim.events import EventQueue
from cluster_sim.network import Network
from cluster_sim.reports.figures import Figures
from cluster_sim.request import Attempt, RequestRun
from cluster_sim.request_figures import RequestFigures
from cluster_sim.worker import SimWorker
from cluster_sim.workloads.requests import SimRequest
from control_plane.dispatch import journey_steps as steps
from control_plane.fleet.membership import Membership
from control_plane.model.job import Lease
from control_plane.model.lifecycle import Event
from control_plane.model.worker_snapshot import Pool
from control_plane.placement.placer import Placer

_PLACE_AGAIN_S = 0.05
_STOP = generation.FINISH_REASON_LENGTH
_LOST = steps.WorkerLost("the worker does not answer")


class SimDispatcher:
    """Runs requests; `figures` holds what came of them."""

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
        self._requests = RequestFigures(figures, settings.warm_up_s)
        self._kv_bytes_per_token = kv_bytes_per_token
        self._worker_of = worker_of
        self._limits = settings.limits
        self._numbers = count(1)
        # By the engine's name for it: which request runs there, and as what.
        self._running: dict[int, tuple[RequestRun, Pool]] = {}
        self._open: dict[int, RequestRun] = {}
        # Prefilled prompts of requests that are over, whose leases are not safe to release yet.
        self._leased: set[Attempt] = set()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def held_leases(self) -> int:
        """Of requests that are over."""
        return len(self._leased)

    def unfinished(self) -> Iterator[RequestRun]:
        """Requests that have no outcome yet."""
        return iter(self._open.values())

    def arrive(self, number: int, request: SimRequest) -> None:
        self._requests.arrived(self._events.now_s, request)
        run = self._open[number] = RequestRun.of(number, request, self._settings.timeout_s, self._limits)
        run.job.lifecycle.at(Event.ADMITTED)
        self._events.at(run.job.deadline_s, lambda: self._expire(number))
        for after_s, following in request.inputs[1:]:
            self._events.after(after_s, partial(self._input, run, following))
        self._handle(run, steps.Begun())

    def outcome(self, worker: SimWorker, outcome: Outcome) -> None:
        """What an engine reports."""
        found = self._running.get(outcome.job.number)
        if found is None:
            return
        run, pool = found
        number, hop_s = outcome.job.number, self._settings.hop_s
        if outcome.kind is OutcomeKind.REFUSED:
            self._end(run, Event.REFUSED)
        elif outcome.kind is OutcomeKind.PULLS:
            self._pull(run, worker, outcome)
        elif pool == wire.POOL_PREFILL:
            if outcome.kind is OutcomeKind.FINISHED:
                self._events.after(hop_s, lambda: self._prefilled(run, number))
        elif outcome.kind is OutcomeKind.FIRST_TOKEN:
            self._events.after(hop_s, lambda: self._decode_started(run, number))
        else:
            self._events.after(hop_s, lambda: self._decode_ended(run, number))

    def lost(self, worker: SimWorker) -> None:
        """The worker is gone; every request that it ran learns of it."""
        for number, (run, pool) in list(self._running.items()):
            attempt = run.prefill if pool == wire.POOL_PREFILL else run.decode
            if attempt is not None and attempt.number == number and attempt.worker is worker:
                self._lost(run, pool)

    # The journey's instructions.

    def _handle(self, run: RequestRun, event: steps.Event) -> None:
        for instruction in run.journey.handle(event, self._events.now_s):
            match instruction:
                case steps.Route():
                    self._route(run)
                case steps.PlacePrefill(excluded):
                    run.placement = self._placer.place(run.job, wire.POOL_PREFILL, excluded)
                    self._placed_for_prefill(run)
                case steps.AwaitPrompt():
                    run.awaits_prompt = True
                    if run.prompt_is_whole:
                        self._prompt_complete(run)
                case steps.CallPrefill():
                    self._call_prefill(run)
                case steps.PlaceDecode():
                    self._place_decode(run, instruction, self._events.now_s + instruction.most_s(self._events.now_s))
                case steps.CallDecode(pulls=pulls):
                    self._call_decode(run, pulls=pulls)
                case steps.CountPrompt():
                    self._placer.keep(run.job)
                case steps.Emit():
                    self._requests.emitted(run, self._events.now_s)
                case steps.Suspect(snapshot):
                    self._membership.suspect(snapshot)
                case steps.MarkDraining(snapshot):
                    self._membership.drains(snapshot)
                case steps.Release(lease):
                    self._release(run, lease)
                case steps.Complete():
                    self._forget(run)
                case steps.Fail(cause):
                    self._end(run, Event.DEADLINE_PASSED if cause is steps.Cause.DEADLINE else Event.FAULT)

    def _route(self, run: RequestRun) -> None:
        try:
            run.placement = self._placer.route(run.job, is_whole=run.prompt_is_whole)
        except OverloadedError:
            self._end(run, Event.REFUSED)
        else:
            self._placed_for_prefill(run)

    def _placed_for_prefill(self, run: RequestRun) -> None:
        worker = run.placement.worker if run.placement is not None else None
        decode_is_usable = bool(self._membership.usable(wire.POOL_DECODE))
        self._handle(run, steps.Placed(worker, run.prompt_is_whole, decode_is_usable))

    def _prompt_complete(self, run: RequestRun) -> None:
        run.awaits_prompt = False
        self._figures.local_prefills += 1
        self._handle(run, steps.PromptComplete())

    def _call_prefill(self, run: RequestRun) -> None:
        request, session = run.request, run.session
        job = SimJob(
            next(self._numbers),
            request.prompt_tokens,
            request.keys,
            min(1, request.output_tokens),
            hand_off=request.output_tokens > 1,
            tenant=request.tenant,
        )
        attempt = run.prefill = self._begin(run, job.number)
        worker = attempt.worker
        if session is None:
            self._call(run, attempt, wire.POOL_PREFILL, lambda: worker.add(job))
        else:
            opening = replace(session, replaces=False)
            self._call(run, attempt, wire.POOL_PREFILL, lambda: worker.open(job, opening, request.mode))

    def _place_decode(self, run: RequestRun, place: steps.PlaceDecode, until_s: float) -> None:
        """On the best decode worker there is, once there is one."""
        if run.is_over:
            return
        run.placement = self._placer.place(
            run.job, wire.POOL_DECODE, place.excluded, avoided=place.avoided, prefills=place.prefills
        )
        if run.placement is not None:
            self._handle(run, steps.Placed(run.placement.worker))
        elif self._events.now_s > until_s:
            self._handle(run, steps.Placed(None))
        else:
            self._events.after(_PLACE_AGAIN_S, lambda: self._place_decode(run, place, until_s))

    def _call_decode(self, run: RequestRun, *, pulls: bool) -> None:
        assert run.placement is not None
        job = self._decode_job(run, pulls=pulls or run.is_held_by(run.placement.worker.worker_id))
        attempt = run.decode = self._begin(run, job.number)
        run.was_pulled = False
        self._call(run, attempt, wire.POOL_DECODE, lambda: attempt.worker.add(job))

    def _release(self, run: RequestRun, lease: Lease) -> None:
        attempt = run.prefill
        if attempt is not None and not attempt.is_under_way:
            self._leased.add(attempt)
            self._events.at(max(lease.safe_at_s, self._events.now_s), lambda: self._give_back(run, attempt))

    # What workers answer.

    def _input(self, run: RequestRun, following: SimInput) -> None:
        """The next piece of a session's prompt."""
        if run.is_over:
            return
        run.take(following)
        attempt = run.prefill
        if attempt is not None:
            worker, number = attempt.worker, attempt.number
            self._events.after(self._settings.hop_s, lambda: worker.take_input(number, following))
        elif run.awaits_prompt and run.prompt_is_whole:
            self._prompt_complete(run)

    def _prefilled(self, run: RequestRun, number: int) -> None:
        attempt = run.prefill
        if attempt is None or attempt.number != number:
            return
        attempt.flight.prefilled()
        attempt.end()
        is_over = run.request.output_tokens <= 1
        if not is_over:
            self._events.after(self._settings.handoff_deadline_s, lambda: self._hand_off_expired(run, attempt))
        self._handle(run, steps.Prefilled(finish_reason=_STOP if is_over else None))

    def _hand_off_expired(self, run: RequestRun, attempt: Attempt) -> None:
        """The prefill worker keeps nothing any longer that has not been pulled."""
        if run.prefill is attempt:
            self._give_back(run, attempt)
            self._break_pull(run)

    def _pull(self, run: RequestRun, worker: SimWorker, outcome: Outcome) -> None:
        """The decode worker has room for the prompt's KV."""
        source, number = run.prefill, outcome.job.number
        run.pull_requested_s = self._events.now_s
        if source is None:
            self._recompute(run)
            return

        def landed() -> None:
            run.transfer = None
            run.was_pulled = True
            self._give_back(run, source)
            worker.landed(number)

        if source.worker is worker:
            # Its engine finds there what it has prefilled.
            self._events.after(0.0, landed)
            return

        def pulled() -> None:
            self._figures.transfer_s.add(self._events.now_s - run.pull_requested_s)
            landed()

        size = outcome.tokens * self._kv_bytes_per_token
        self._figures.transferred_bytes += size
        run.transfer = self._network.start(source.worker.egress, worker.ingress, size, pulled)

    def _recompute(self, run: RequestRun) -> None:
        """The prompt's KV is gone: the decode worker computes it, in the call that it has."""
        attempt = run.decode
        assert attempt is not None
        self._figures.retries += 1
        self._running.pop(attempt.number, None)
        attempt.worker.abort(attempt.number)
        job = self._decode_job(run, pulls=False)
        attempt.number = job.number
        self._running[job.number] = (run, wire.POOL_DECODE)
        attempt.worker.add(job)

    def _decode_started(self, run: RequestRun, number: int) -> None:
        if run.decode is None or run.decode.number != number or run.is_over:
            return
        run.decode.flight.prefilled()
        pulled, none = generation.HANDOFF_OUTCOME_PULLED, generation.HANDOFF_OUTCOME_NONE
        self._handle(run, steps.DecodeStarted(pulled if run.was_pulled else none))
        self._handle(run, steps.Generated())

    def _decode_ended(self, run: RequestRun, number: int) -> None:
        if run.decode is not None and run.decode.number == number:
            self._handle(run, steps.Ended(_STOP, run.request.output_tokens))

    def _lost(self, run: RequestRun, pool: Pool) -> None:
        """The worker does not answer."""
        attempt = run.prefill if pool == wire.POOL_PREFILL else run.decode
        assert attempt is not None
        self._running.pop(attempt.number, None)
        if pool == wire.POOL_PREFILL:
            run.prefill = None
            self._leased.discard(attempt)
            if not attempt.is_under_way:
                # It had prefilled: what it kept cannot be pulled any more.
                self._break_pull(run)
                return
        else:
            run.decode = None
            self._cancel_transfer(run)
        attempt.end()
        self._figures.retries += 1
        self._handle(run, _LOST)

    # Calls, and their ends.

    def _begin(self, run: RequestRun, number: int) -> Attempt:
        placement, run.placement = run.placement, None
        assert placement is not None, "a worker is called without having been placed on"
        chosen = placement.worker
        return Attempt(number, self._worker_of(chosen.worker_id), chosen.generation, self._placer.begin(placement))

    def _decode_job(self, run: RequestRun, *, pulls: bool) -> SimJob:
        request = run.request
        return SimJob(
            next(self._numbers),
            request.prompt_tokens,
            request.keys,
            request.output_tokens,
            pulls=pulls,
            tenant=request.tenant,
        )

    def _call(self, run: RequestRun, attempt: Attempt, pool: Pool, begin: Callable[[], bool]) -> None:
        """begin: at the worker; False where nobody answers, as after a restart since it was placed."""
        number = attempt.number
        self._running[number] = (run, pool)

        def arrive() -> None:
            if number in self._running and not (attempt.worker.generation == attempt.generation and begin()):
                self._lost(run, pool)

        self._events.after(self._settings.hop_s, arrive)

    def _break_pull(self, run: RequestRun) -> None:
        if self._cancel_transfer(run):
            self._recompute(run)

    def _cancel_transfer(self, run: RequestRun) -> bool:
        """Whether one was under way."""
        transfer, run.transfer = run.transfer, None
        if transfer is not None:
            transfer.cancel()
        return transfer is not None

    def _give_back(self, run: RequestRun, attempt: Attempt) -> None:
        """The prefill worker keeps nothing of the prompt any more."""
        self._leased.discard(attempt)
        if run.prefill is not attempt:
            return
        run.prefill = None
        self._running.pop(attempt.number, None)
        if attempt.is_under_way:
            attempt.end()
            attempt.worker.abort(attempt.number)
        else:
            attempt.worker.release(attempt.number)

    def _expire(self, number: int) -> None:
        run = self._open.get(number)
        if run is not None:
            self._end(run, Event.DEADLINE_PASSED)

    def _end(self, run: RequestRun, event: Event) -> None:
        """The request's one outcome, where it does not finish."""
        if run.is_over:
            return
        run.job.lifecycle.at(event)
        decode = run.decode
        if decode is not None:
            decode.worker.abort(decode.number)
        self._forget(run)

    def _forget(self, run: RequestRun) -> None:
        """Nothing of the request is left anywhere, but for a lease that is not safe to release yet."""
        del self._open[run.number]
        self._cancel_transfer(run)
        if run.prefill is not None and run.prefill.is_under_way:
            self._give_back(run, run.prefill)
        if run.decode is not None:
            self._running.pop(run.decode.number, None)
            run.decode.end()
        self._handle(run, steps.Closed())
        self._requests.ended(run, self._events.now_s)
