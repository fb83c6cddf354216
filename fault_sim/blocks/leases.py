"""The leases of one engine: blocks of finished prompts, held until a peer has pulled them or they expire."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster_core.clock import ClusterClock
from cluster_core.engine_jobs import KvLease
from cluster_core.engine_reports import EngineCounters
from fault_sim.blocks.commands import Commands
from fault_sim.blocks.fabric import BlockEngineSettings
from fault_sim.blocks.pool import BlockPool
from fault_sim.blocks.run import Run
from kv_transfer.handoff.lease_params import encode_params
from kv_transfer.handoff.rules import stamp_deadline


class Leases:
    """A lease has the name of its request."""

    def __init__(
        self,
        engine_id: str,
        settings: BlockEngineSettings,
        clock: ClusterClock,
        pool: BlockPool,
        commands: Commands,
        counters: EngineCounters,
    ) -> None:
        self._engine_id = engine_id
        self._settings = settings
        self._clock = clock
        self._pool = pool
        self._commands = commands
        self._counters = counters
        self._held: dict[str, _Held] = {}

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, run: Run) -> KvLease:
        """The run has ended; its blocks are the lease's."""
        lease_id, blocks = run.job.request_id, run.blocks
        run.blocks = []
        timer = asyncio.get_running_loop().call_later(self._settings.lease_s, self._expire, lease_id)
        self._held[lease_id] = _Held(blocks, timer)
        self._counters.handoffs_leased += 1
        params = encode_params({"engine": self._engine_id, "blocks": blocks})
        return KvLease(lease_id, params, stamp_deadline(self._clock.unix_ms(), self._settings.deadline_s))

    def free(self, lease_id: str) -> bool:
        """False where it was freed before."""
        held = self._held.pop(lease_id, None)
        if held is None:
            return False
        held.timer.cancel()
        self._pool.drop(held.blocks)
        return True

    def blocks(self) -> Iterator[Sequence[int]]:
        """Of each lease."""
        return (held.blocks for held in self._held.values())

    def _expire(self, lease_id: str) -> None:
        def expire() -> None:
            self._counters.handoffs_expired += self.free(lease_id)

        self._commands.add(expire)


@dataclass(frozen=True, slots=True)
class _Held:
    blocks: list[int]
    timer: asyncio.TimerHandle
