"""The pool of the placement bench: prefill workers on the simulator's light engine, behind the router's own placement.

Real are the policies, the prefix index with its predictions, the columns of what is in flight, and the workers' tiers;
simulated are time and the engines. A worker prefills its prompts one by one in the order in which they came, each in
one step, and claims its blocks with a delay. Every policy gets the same arrivals, the same predictions of its own
placements, and the same caches.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rachis.v1 import worker_pb2 as wire

from benchmarks.placement_costs import PrefillCosts, PrefillModel
from cluster_configs.schema import PlacementSection
from cluster_sim.engines.engine import OutcomeKind, SimJob
from cluster_sim.engines.light_engine import LightEngine, LightEngineSettings
from cluster_sim.events import Alarm, EventQueue
from cluster_sim.request import job_of
from cluster_sim.workloads.requests import SimRequest
from control_plane.fleet.membership import Membership
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.placer import Flight, Placer
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys
from kv_transfer.tiers.settings import TierSettings

# An 80 GB GPU with an 8B model in bf16: 72 GB are the engine's, 16 GB of them weights and some 4 GB activations; the
# rest holds 400,000 tokens of 128 KiB. Of host memory 128 GiB are a GPU's part where eight share a host with 1 TiB.
DEVICE_TOKENS = "400k"
HOST_TOKENS = "1M"

_GENERATION = 1
_HALF_LIFE_S = 60.0
_SPARE_ENTRIES = 1 << 16
_AT_ONCE_S = 1e-9
# More than any prompt has: each is computed in one step.
_WHOLE_PROMPT = 1 << 40


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A request of a trace."""

    # In the order of arrival.
    number: int
    arrival_s: float
    tokens: int
    output_tokens: int
    # Of its full blocks.
    keys: Keys


@dataclass(frozen=True, slots=True)
class Caches:
    """What a worker can hold, in blocks."""

    block_tokens: int
    device_blocks: int
    host_blocks: int
    settings: TierSettings

    def holds(self, prompt_tokens: int) -> bool:
        """Whether a prompt of so many tokens fits on the device, with the token that it is answered with."""
        return prompt_tokens < self.device_blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class Cluster:
    """A pool of equal workers and what the router makes of them."""

    workers: int
    caches: Caches
    costs: PrefillCosts
    event_delay_s: float = 0.1
    # How long a prompt counts as held by the worker that it was sent to; 0: not at all.
    prediction_s: float = 5.0
    seed: int = 0

    @property
    def names(self) -> list[str]:
        return [f"prefill-{number:04}" for number in range(self.workers)]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What came of one prompt. worker: its number. begun_s: when the worker had ended what came before."""

    prompt: Prompt
    worker: int
    begun_s: float
    ended_s: float


class PlacementWorld:
    """One policy on one pool: `run`, once. entries: chunks of all prompts. Raises KeyError for an unknown policy."""

    def __init__(self, policy: str, cluster: Cluster, entries: int) -> None:
        self._cluster = cluster
        self._events = EventQueue()
        self.router = SimulatedRouter(policy, cluster, entries, lambda: self._events.now_s)
        settings = LightEngineSettings(
            cluster.caches.block_tokens,
            cluster.caches.device_blocks,
            cluster.caches.host_blocks,
            max_running_requests=1,
            max_batched_tokens=_WHOLE_PROMPT,
            tiers=cluster.caches.settings,
        )
        self.engines = [LightEngine(PrefillModel(cluster.costs), settings) for _ in cluster.names]
        self._alarms = [Alarm(self._events, partial(self._go_on, number)) for number, _ in enumerate(self.engines)]
        self._in_flight: dict[int, tuple[Prompt, Flight]] = {}
        self._free_from_s = [0.0] * cluster.workers
        self._prefilled: list[Prefilled] = []

    def run(self, prompts: Sequence[Prompt], placed: Callable[[int], None]) -> list[Prefilled]:
        """prompts: by arrival. placed: called with 1 for each. What came of them, in the order in which they ended."""
        arrivals = iter(prompts)
        self._plan_next(arrivals, placed)
        while self._events.step():
            pass
        assert len(self._prefilled) == len(prompts), "a prompt was never prefilled"
        return self._prefilled

    def _plan_next(self, arrivals: Iterator[Prompt], placed: Callable[[int], None]) -> None:
        prompt = next(arrivals, None)
        if prompt is not None:
            self._events.at(prompt.arrival_s, lambda: self._arrive(prompt, arrivals, placed))

    def _arrive(self, prompt: Prompt, arrivals: Iterator[Prompt], placed: Callable[[int], None]) -> None:
        number, flight = self.router.place(prompt)
        self._in_flight[prompt.number] = prompt, flight
        self.engines[number].add(SimJob(prompt.number, prompt.tokens, prompt.keys, 1), self._events.now_s)
        self._go_on(number)
        placed(1)
        self._plan_next(arrivals, placed)

    def _go_on(self, number: int) -> None:
        """What the worker has ended by now, what it claims of it, and when it is to be looked at again."""
        engine, now_s = self.engines[number], self._events.now_s
        for outcome in engine.advance(now_s):
            assert outcome.kind is not OutcomeKind.REFUSED, "a prompt does not fit on the device"
            if outcome.kind is OutcomeKind.FINISHED:
                prompt, flight = self._in_flight.pop(outcome.job.number)
                flight.prefilled()
                flight.end()
                begun_s = max(prompt.arrival_s, self._free_from_s[number])
                self._free_from_s[number] = outcome.at_s
                self._prefilled.append(Prefilled(prompt, number, begun_s, outcome.at_s))
        change = engine.claim_changes()
        if len(change):
            self._events.after(self._cluster.event_delay_s, partial(self.router.claimed, number, change))
        self._alarms[number].set(engine.next_s())


class SimulatedRouter:
    """The router's placement in simulated time, for prompts of a trace."""

    def __init__(self, policy: str, cluster: Cluster, entries: int, now_s: Callable[[], float]) -> None:
        self._names = cluster.names
        self._now_s = now_s
        self.membership = Membership()
        self.membership.replace([_registration(name, cluster) for name in self._names])
        self._index = PrefixIndex(entries + _SPARE_ENTRIES, _HALF_LIFE_S)
        for name in self._names:
            self._index.join(name, _GENERATION)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._placer = Placer(
            self.membership,
            IndexPorts(self._index, now_s=now_s, record_access=lambda keys: self._index.accessed(keys, now_s())),
            # Without predictions: one that ends as it begins.
            PlacementSection(policy=policy, prediction_s=cluster.prediction_s or _AT_ONCE_S),
            service_id="",
            chunk_tokens=cluster.caches.block_tokens,
            rng=random.Random(cluster.seed),
            now_s=now_s,
        )

    def place(self, prompt: Prompt) -> tuple[int, Flight]:
        """The worker's number, and the request on it."""
        request = SimRequest(self._now_s(), prompt.tokens, prompt.output_tokens, prompt.keys)
        job = job_of(prompt.number, request, math.inf)
        self._placer.keep(job)
        placement = self._placer.place(job, wire.POOL_PREFILL)
        assert placement is not None
        return self._numbers[placement.worker.worker_id], self._placer.begin(placement)

    def claimed(self, number: int, change: ClaimChange) -> None:
        """The worker's claims have arrived."""
        self._index.apply(self._names[number], change)


def _registration(name: str, cluster: Cluster) -> wire.WorkerRegistration:
    caches = cluster.caches
    return wire.WorkerRegistration(
        worker_id=name,
        generation=_GENERATION,
        pool=wire.POOL_PREFILL,
        state=wire.WORKER_STATE_READY,
        block_size_tokens=caches.block_tokens,
        max_running_requests=1,
        load=wire.WorkerLoad(free_blocks=caches.device_blocks, total_blocks=caches.device_blocks),
        costs=wire.WorkerCosts(
            prefill_s=cluster.costs.fixed_s,
            prefill_s_per_token=cluster.costs.s_per_token,
            prefill_s_per_pair=cluster.costs.s_per_pair,
            load_s_per_token=cluster.costs.load_s_per_token,
        ),
    )
