"""What block engines share: their settings, and the fabric over which they read each other's blocks."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fault_sim.blocks.pool import BlockPool, Kv
from fault_sim.network import Network

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

    async def read(
        self, host: str, engine_id: str, blocks: Sequence[int], work_s: float, gives_up: Callable[[], bool]
    ) -> list[list[Kv]]:
        """What these blocks of that engine hold when the transfer ends; nothing where it fails.

        work_s: what it takes over a link at its usual speed. gives_up: whether a cut link is waited for no longer.
        """
        peer = self.engines.get(engine_id)
        if peer is None:
            return []
        link = self.network.link(host, peer.host)
        while work_s > 0 and not (link.is_cut and gives_up()):
            took_s = min(work_s * link.slow, _SLICE_S)
            await asyncio.sleep(took_s)
            work_s -= 0 if link.is_cut else max(took_s / link.slow, 1e-9)
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
