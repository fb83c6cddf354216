"""What block engines share: their settings, and the fabric over which they read each other's blocks."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster_core.engine_jobs import EngineJob
from fault_sim.blocks.pool import BlockPool, Kv
from fault_sim.network import BREAK_S, Network

# A transfer goes as fast as its link is for so long.
_SLICE_S = 0.1


@dataclass(frozen=True, slots=True)
class BlockEngineSettings:
    """step_s, token_s: what a step takes, and each token of it. pull_s, pull_token_s: the same of a pull."""

    blocks: int = 1024
    block_tokens: int = 4
    max_model_len: int = 4096
    deadline_s: float = 3.0
    lease_s: float = 6.0
    step_s: float = 0.005
    token_s: float = 0.0002
    pull_s: float = 0.01
    pull_token_s: float = 0.0005
    chunk_tokens: int = 128
    service_id: str = ""
    max_adapters: int = 2


class Peer(Protocol):
    host: str
    pool: BlockPool

    def pulled(self, lease_id: str) -> None:
        """A peer has what it wanted of a lease."""
        ...


class Fabric:
    """Engines by their ids, which are another for each start, and the links that pulls go over."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.engines: dict[str, Peer] = {}
        # An engine that computes one of these prompts dies of it.
        self.poison: set[tuple[int, ...]] = set()
        # Folders with adapters, by their paths, the same on all hosts: digests of what they hold.
        self.adapters: dict[str, str] = {}
        # Gets the host of an engine that has died so, and its job.
        self.on_poisoned: Callable[[str, EngineJob], None] = lambda host, job: None
        # Gets the host of an engine that is asked, and its job, whose prompt is whole.
        self.on_asked: Callable[[str, EngineJob], None] = lambda host, job: None

    async def read(self, host: str, engine_id: str, blocks: Sequence[int], work_s: float) -> list[list[Kv]]:
        """What these blocks of that engine hold when the transfer ends; nothing where it fails.

        A cut link breaks it off when a connection would notice, one that is frozen holds it for as long as it is.
        work_s: what it takes over a link at its usual speed.
        """
        peer = self.engines.get(engine_id)
        if peer is None:
            return []
        link = self.network.link(host, peer.host)
        cut_s = 0.0
        while work_s > 0 and cut_s < BREAK_S and engine_id in self.engines:
            took_s = min(work_s * link.slow, _SLICE_S)
            await asyncio.sleep(took_s)
            cut_s = cut_s + took_s if link.is_cut else 0.0
            if not link.is_cut and not link.is_frozen:
                work_s -= max(took_s / link.slow, 1e-9)
        if work_s > 0 or engine_id not in self.engines:
            return []
        return [list(peer.pool.kv[block]) for block in blocks]

    async def tell_pulled(self, host: str, engine_id: str, lease_id: str) -> None:
        """Where the link is cut then, it is lost."""
        peer = self.engines.get(engine_id)
        if peer is None:
            return
        link = self.network.link(host, peer.host)
        await asyncio.sleep(link.delay_s())
        if not link.is_cut:
            peer.pulled(lease_id)
