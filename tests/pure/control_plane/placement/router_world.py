"""A placer over two workers in each pool on a clock that tests move, and all that a decision could leave behind."""

import random
from collections.abc import Callable
from typing import Any

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import PlacementSection
from cluster_core.ids import RequestId
from control_plane.fleet.membership import Membership
from control_plane.model.job import Job
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.ledger import Ledger
from control_plane.placement.placer import Placer
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys
from tests.pure.control_plane.placement.left_behind import ledger_of, left_behind

CHUNK = 16
PREFILL, DECODE = wire.POOL_PREFILL, wire.POOL_DECODE
POOLS = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}
COSTS = wire.WorkerCosts(
    prefill_s_per_token=1e-3, load_s_per_token=1e-4, decode_step_s=0.01, pull_s=0.05, pull_s_per_token=1e-5
)


class RouterWorld:
    """settings: of `PlacementSection`."""

    def __init__(self, seed: int = 0, make_placer: Callable[..., Placer] = Placer, **settings: Any) -> None:
        self.now_s = 100.0
        self.is_stale = False
        self.membership = Membership()
        self.membership.replace([_record(name) for name in POOLS])
        self.index = PrefixIndex(1024, 100.0)
        for name in POOLS:
            self.index.join(name, 1)
        self.accesses: list[Keys] = []
        self.rng = random.Random(seed)
        self.placer = make_placer(
            self.membership,
            IndexPorts(self.index, lambda: self.is_stale, lambda: self.now_s, self.accesses.append),
            PlacementSection(**settings),
            service_id="s",
            chunk_tokens=CHUNK,
            rng=self.rng,
            now_s=lambda: self.now_s,
        )
        self._jobs = 0

    def job(self, tokens: list[int]) -> Job:
        self._jobs += 1
        name = RequestId(f"r{self._jobs}")
        return Job(name, tokens, generation.SamplingParams(max_tokens=8), RequestLifecycle(name), 0.0, 1e9)

    def holds(self, worker: str, tokens: list[int]) -> None:
        self.index.apply(worker, ClaimChange(device_stored=self.placer.packed(tokens, PrefixScope()).keys))

    def does_both(self) -> None:
        """All workers prefill and decode."""
        self.membership.replace([_record(name, wire.POOL_SHARED) for name in POOLS])

    def costs(self, worker: str, costs: wire.WorkerCosts) -> None:
        """It has measured these."""
        self._registers(worker, wire.WorkerRegistration(costs=costs))

    def blocks(self, worker: str, blocks: int) -> None:
        """It has memory for so many, all of them free."""
        self._registers(worker, wire.WorkerRegistration(load=wire.WorkerLoad(free_blocks=blocks, total_blocks=blocks)))

    def without(self, pool: wire.Pool.ValueType) -> None:
        """The workers of this pool leave."""
        self.membership.replace([_record(name) for name, its in POOLS.items() if its != pool])

    def _registers(self, worker: str, told: wire.WorkerRegistration) -> None:
        records = [member.registration for member in self.membership.members()]
        for record in records:
            if record.worker_id == worker:
                record.MergeFrom(told)
        self.membership.replace(records)

    @property
    def ledger(self) -> Ledger:
        return ledger_of(self.placer)

    @property
    def predictions(self) -> int:
        # The index shows what it believes, not the predictions that are to be withdrawn.
        return len(self.index._predictions)

    def left_behind(self) -> dict[str, Any]:
        """All that placements leave behind; equal where nothing has changed."""
        return left_behind(self.placer, self.index, self.membership) | {"accesses": len(self.accesses)}


def prompt(seed: int, tokens: int = 10 * CHUNK) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


def _record(name: str, pool: "wire.Pool.ValueType | None" = None) -> wire.WorkerRegistration:
    return wire.WorkerRegistration(
        worker_id=name,
        generation=1,
        pool=POOLS[name] if pool is None else pool,
        state=wire.WORKER_STATE_READY,
        block_size_tokens=CHUNK,
        max_running_requests=64,
        load=wire.WorkerLoad(free_blocks=1000, total_blocks=1000),
        costs=COSTS,
    )
