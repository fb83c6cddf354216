"""One worker of the simulated cluster: an engine, its links, and what the registry says of it."""

from collections.abc import Callable
from dataclasses import dataclass

from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import SessionMode
from cluster_sim.costs.step_work import CostModel
from cluster_sim.engines.engine import EngineTotals, Outcome, SimEngine, SimInput, SimJob
from cluster_sim.events import Alarm, EventQueue
from cluster_sim.network import Link
from control_plane.model.worker_snapshot import Pool
from kv_transfer.claims.claims import ClaimChange


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Workers of one pool: how many, on what, and how an engine of theirs is made."""

    workers: int
    cost_model: CostModel
    make_engine: Callable[[], SimEngine]
    max_running_requests: int = 256


class SimWorker:
    """`on_outcome` gets what comes of its engine; `on_change` its generation, and what has changed in its caches."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        settings: PoolSettings,
        block_tokens: int,
        events: EventQueue,
        on_outcome: Callable[["SimWorker", Outcome], None],
        on_change: Callable[["SimWorker", int, ClaimChange], None],
    ) -> None:
        self.name = name
        self.pool = pool
        self.engine = settings.make_engine()
        self.generation = 1
        self.is_alive = True
        # Of generations before this one.
        self.past: list[EngineTotals] = []
        self.last_alive_s = 0.0
        bandwidth = settings.cost_model.network_bytes_per_s
        self.egress, self.ingress = Link(bandwidth), Link(bandwidth)
        self._settings = settings
        self._block_tokens = block_tokens
        self._events = events
        self._on_outcome = on_outcome
        self._on_change = on_change
        self._alarm = Alarm(events, self._advance)

    def add(self, job: SimJob) -> bool:
        """False: it is not there."""
        if self.is_alive:
            self.engine.add(job, self._events.now_s)
            self._follow()
        return self.is_alive

    def open(self, job: SimJob, first: SimInput, mode: SessionMode) -> bool:
        """False: it is not there."""
        if self.is_alive:
            self.engine.open(job, first, mode, self._events.now_s)
            self._follow()
        return self.is_alive

    def take_input(self, number: int, following: SimInput) -> None:
        self.engine.take_input(number, following, self._events.now_s)
        self._follow()

    def landed(self, number: int) -> None:
        self.engine.landed(number, self._events.now_s)
        self._follow()

    def release(self, number: int) -> None:
        self.engine.release(number, self._events.now_s)
        self._follow()

    def abort(self, number: int) -> None:
        self.engine.abort(number, self._events.now_s)
        self._follow()

    def slow_down(self, factor: float) -> None:
        self.engine.slow_down(factor, self._events.now_s)
        self._follow()

    def kill(self) -> None:
        """It is gone, with all that it holds."""
        self.is_alive = False
        self.past.append(self.engine.totals)
        self.engine = self._settings.make_engine()
        self._alarm.set(float("inf"))

    def restart(self) -> None:
        self.is_alive = True
        self.generation += 1

    def totals(self) -> list[EngineTotals]:
        """Of all its generations."""
        return [*self.past, self.engine.totals]

    def registration(self) -> wire.WorkerRegistration:
        free, total = self.engine.load()
        costs = self.engine.costs()
        return wire.WorkerRegistration(
            worker_id=self.name,
            generation=self.generation,
            pool=self.pool,
            state=wire.WORKER_STATE_READY,
            block_size_tokens=self._block_tokens,
            max_running_requests=self._settings.max_running_requests,
            load=wire.WorkerLoad(free_blocks=free, total_blocks=total),
            costs=wire.WorkerCosts(
                prefill_s=costs.prefill_s,
                prefill_s_per_token=costs.prefill_s_per_token,
                prefill_s_per_pair=costs.prefill_s_per_pair,
                load_s_per_token=costs.load_s_per_token,
                decode_step_s=costs.decode_step_s,
                pull_s=costs.pull_s,
                pull_s_per_token=costs.pull_s_per_token,
            ),
        )

    def _advance(self) -> None:
        for outcome in self.engine.advance(self._events.now_s):
            self._on_outcome(self, outcome)
        change = self.engine.claim_changes()
        if len(change):
            self._on_change(self, self.generation, change)
        self._follow()

    def _follow(self) -> None:
        self._alarm.set(self.engine.next_s() if self.is_alive else float("inf"))
