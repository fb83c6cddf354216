"""The whole cluster in simulated time.

Production code: placement with all its parts (`placer`), the prefix index, membership, the lifecycle of
requests, tiers, hotness and, in `engines.vllm_engine`, the schedulers. Left out: copies of hot prefixes. Not
real: engine arithmetic, transport, clock and Redis, whose streams are a delay between a worker's caches and the index.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import PlacementSection
from cluster_sim.dispatch import SimDispatcher
from cluster_sim.dispatch_settings import DispatchSettings
from cluster_sim.engines.engine import Outcome
from cluster_sim.events import EventQueue
from cluster_sim.network import Network
from cluster_sim.reports.figures import Figures, Series
from cluster_sim.worker import PoolSettings, SimWorker
from cluster_sim.workloads.requests import SERVICE, SimRequest
from control_plane.fleet.membership import Membership
from control_plane.model.worker_snapshot import Pool
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.objective_placer import BothRules, ObjectivePlacer
from control_plane.placement.placer import Placer
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.claims import ClaimChange

POOLS: Mapping[str, Pool] = {"prefill": wire.POOL_PREFILL, "decode": wire.POOL_DECODE}


@dataclass(frozen=True, slots=True)
class Fault:
    """worker: by name. kill: it is gone, and comes back empty after `for_s`. slow: its steps take `factor` times as
    long; link: so many times less of its bandwidth is left; both end after `for_s`."""

    at_s: float
    kind: Literal["kill", "slow", "link"]
    worker: str
    for_s: float = 30.0
    factor: float = 10.0


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """pools: by name of `POOLS`; a service without prefill workers is an aggregated one.

    event_delay_s: from a change in a worker's caches to the index. pull_s: what connector and engine take for a pull,
    beside the transfer. report_s: how often workers renew their registration, which ends `lease_s` after the last time.
    half_life_s: of hotness.
    """

    pools: Mapping[str, PoolSettings]
    block_tokens: int
    placement: PlacementSection = field(default_factory=PlacementSection)
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    faults: Sequence[Fault] = ()
    event_delay_s: float = 0.1
    pull_s: float = 0.0
    report_s: float = 2.0
    lease_s: float = 5.0
    index_entries: int = 1 << 22
    half_life_s: float = 600.0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    # Of workers that all do both and are placed on by the objectives; None: by the policy of `placement`.
    both: BothRules | None = None
    # Further objectives, (TTFT, TPOT) in seconds, whose attainment is counted in the same run.
    objectives: Sequence[tuple[float, float]] = ()


class World:
    """One run: `run`, once."""

    def __init__(self, name: str, settings: WorldSettings) -> None:
        self._settings = settings
        self.events = EventQueue()
        self.membership = Membership()
        self.index = PrefixIndex(settings.index_entries, settings.half_life_s)
        models = [pool.cost_model for pool in settings.pools.values() if pool.workers]
        gpus = [(pool.workers * pool.cost_model.gpus, pool.cost_model) for pool in settings.pools.values()]
        self.figures = Figures(
            name=name,
            workers={name: pool.workers for name, pool in settings.pools.items()},
            gpus=sum(number for number, _ in gpus),
            dollars_per_hour=sum(number * model.gpu_dollars_per_hour for number, model in gpus),
            slo_ttft_s=settings.slo_ttft_s,
            slo_tpot_s=settings.slo_tpot_s,
            throughput=Series(settings.report_s),
            steps=Series(settings.report_s),
            prompts=Series(settings.report_s),
            hits=Series(settings.report_s),
            objectives=tuple(settings.objectives),
        )
        make_placer: Callable[..., Placer] = Placer
        if settings.both is not None:
            make_placer = partial(ObjectivePlacer, settings.both)
        self.placer = make_placer(
            self.membership,
            IndexPorts(
                self.index,
                now_s=lambda: self.events.now_s,
                record_access=lambda keys: self.index.accessed(keys, self.events.now_s),
            ),
            settings.placement,
            service_id=SERVICE,
            chunk_tokens=settings.block_tokens,
            rng=random.Random(settings.placement.seed),
            now_s=lambda: self.events.now_s,
        )
        self.workers: dict[str, SimWorker] = {}
        for pool_name, pool in settings.pools.items():
            for number in range(pool.workers):
                worker = SimWorker(
                    f"{pool_name}-{number:04}", POOLS[pool_name], pool, settings.block_tokens, self.events,
                    self._outcome, self._changed,
                )  # fmt: skip
                self.workers[worker.name] = worker
        self.dispatcher = SimDispatcher(
            self.events,
            self.membership,
            self.placer,
            Network(self.events, max(model.network_latency_s for model in models) + settings.pull_s),
            settings.dispatch,
            self.figures,
            models[0].kv_bytes_per_token,
            self.workers.__getitem__,
        )
        self._more_to_come = True
        # What is in the series already.
        self._reported = [0, 0, 0, 0]

    def run(self, requests: Iterable[SimRequest], done: Callable[[int], None] = lambda number: None) -> Figures:
        """requests: by arrival. done: gets the number of requests that have ended."""
        arrivals = enumerate(requests)

        def next_arrival() -> None:
            number, request = next(arrivals, (0, None))
            if request is None:
                self._more_to_come = False
                return
            self.events.at(request.arrival_s, lambda: arrive(number, request))

        def arrive(number: int, request: SimRequest) -> None:
            self.dispatcher.arrive(number, request)
            next_arrival()

        self._report()
        for fault in self._settings.faults:
            self._plan(fault)
        next_arrival()
        ended = 0
        while self._more_to_come or self.dispatcher.open_requests:
            if not self.events.step():
                raise AssertionError(f"stuck: {[each.job for each in self.dispatcher.unfinished()][:5]}")
            if self.figures.requests > ended:
                done(self.figures.requests - ended)
                ended = self.figures.requests
        self._sum_up()
        while self.dispatcher.held_leases:
            self.events.step()
        return self.figures

    def check_invariants(self) -> None:
        """After a run: nothing is left of any request, anywhere."""
        self.membership.check_invariants()
        self.index.check_invariants()
        assert not self.dispatcher.open_requests
        for member in self.membership.members():
            assert not member.in_flight_requests, f"{member.worker_id} counts {member.in_flight_requests} requests"
        for worker in self.workers.values():
            worker.engine.check_invariants()
            free, total = worker.engine.load()
            assert free == total, f"{worker.name}: {total - free} blocks are lost"

    def _outcome(self, worker: SimWorker, outcome: Outcome) -> None:
        self.dispatcher.outcome(worker, outcome)

    def _changed(self, worker: SimWorker, generation: int, change: ClaimChange) -> None:
        def apply() -> None:
            if worker.generation == generation == self.index.generation(worker.name):
                self.index.apply(worker.name, change)

        self.events.after(self._settings.event_delay_s, apply)

    def _report(self) -> None:
        """Workers renew their registrations, the router reads them; totals become series."""
        now_s = self.events.now_s
        records = []
        for worker in self.workers.values():
            if worker.is_alive:
                worker.last_alive_s = now_s
                records.append(worker.registration())
                self.index.join(worker.name, worker.generation)
            elif now_s - worker.last_alive_s < self._settings.lease_s:
                known = self.membership.get(worker.name)
                records += [known.registration] if known is not None else []
            else:
                self.index.leave(worker.name)
        self.membership.replace(records)
        self._add_to_series(now_s)
        if self._more_to_come or self.dispatcher.open_requests:
            self.events.after(self._settings.report_s, self._report)

    def _add_to_series(self, now_s: float) -> None:
        totals = [each for worker in self.workers.values() for each in worker.totals()]
        figures = self.figures
        sums = (
            (figures.throughput, sum(each.decode_tokens for each in totals)),
            (figures.steps, sum(each.decode_steps for each in totals)),
            (figures.hits, sum(each.device_hit_tokens + each.host_hit_tokens for each in totals)),
            (figures.prompts, figures.prompt_tokens),
        )
        # All of it lies between the report before and this one.
        at_s = max(0.0, now_s - self._settings.report_s / 2)
        for (series, so_far), before in zip(sums, self._reported, strict=True):
            if so_far > before:
                series.add(at_s, so_far - before)
        self._reported = [so_far for _, so_far in sums]

    def _plan(self, fault: Fault) -> None:
        worker = self.workers[fault.worker]

        def begin() -> None:
            if fault.kind == "kill" and worker.is_alive:
                worker.kill()
                self.dispatcher.lost(worker)
                self.events.after(fault.for_s, worker.restart)
            elif fault.kind == "slow":
                worker.slow_down(fault.factor)
                self.events.after(fault.for_s, lambda: worker.slow_down(1.0))
            elif fault.kind == "link":
                self._set_links(worker, 1 / fault.factor)
                self.events.after(fault.for_s, lambda: self._set_links(worker, 1.0))

        self.events.at(fault.at_s, begin)

    def _set_links(self, worker: SimWorker, factor: float) -> None:
        worker.egress.factor = worker.ingress.factor = factor
        for transfer in [*worker.egress.transfers, *worker.ingress.transfers]:
            transfer.adjust()

    def _sum_up(self) -> None:
        self._add_to_series(self.events.now_s)
        figures = self.figures
        for name, pool in POOLS.items():
            workers = [each for each in self.workers.values() if each.pool == pool]
            busy = [sum(totals.busy_s for totals in each.totals()) for each in workers]
            if workers:
                figures.busy_s[name] = sum(busy)
                figures.imbalance[name] = max(busy) * len(busy) / sum(busy) if sum(busy) else 1.0
        for totals in (each for worker in self.workers.values() for each in worker.totals()):
            figures.decode_tokens += totals.decode_tokens
            figures.decode_steps += totals.decode_steps
            figures.preemptions += totals.preemptions
            figures.invalidated_tokens += totals.invalidated_tokens
            figures.device_hit_tokens += totals.device_hit_tokens
            figures.host_hit_tokens += totals.host_hit_tokens
