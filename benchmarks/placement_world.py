"""A simulated prefill worker: a queue, the real tiers of its caches, and measured costs instead of an engine.

Prompts are prefilled one by one in the order in which they came, each in one go; `engines.block_cache` of the simulator
holds what is cached. New blocks are published when the prefill has ended; a copy to host memory takes no time here.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from benchmarks.placement_costs import PrefillCosts
from cluster_sim.engines.block_cache import BlockCache
from kv_transfer.blocks import BlockHash
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys
from kv_transfer.tiers.prefix_runs import Match
from kv_transfer.tiers.settings import TierSettings


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """number: in the order of arrival. keys: of its full blocks."""

    number: int
    arrival_s: float
    tokens: int
    output_tokens: int
    keys: Keys


# An 80 GB GPU with an 8B model in bf16: 72 GB are the engine's, 16 GB of them weights and some 4 GB activations; the
# rest holds 400,000 tokens of 128 KiB. Of host memory 128 GiB are a GPU's part where eight share a host with 1 TiB.
DEVICE_TOKENS = "400k"
HOST_TOKENS = "1M"


@dataclass(frozen=True, slots=True)
class Caches:
    """What a worker can hold, in blocks."""

    block_tokens: int
    device_blocks: int
    host_blocks: int
    settings: TierSettings


T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Running(Generic[T]):
    """blocks: taken for what is not on the device; the last may be for a partial block, which nobody shares."""

    prompt: Prompt
    ticket: T
    hashes: Sequence[BlockHash]
    match: Match
    blocks: list[int]


class SimulatedWorker(Generic[T]):
    """T: what the caller wants to have back with each prompt."""

    def __init__(self, caches: Caches, costs: PrefillCosts) -> None:
        self._block_tokens = caches.block_tokens
        self._costs = costs
        self.cache = BlockCache(caches.settings, caches.device_blocks, caches.host_blocks)
        self._queue: deque[tuple[Prompt, T]] = deque()
        self._running: _Running[T] | None = None
        self.busy_s = 0.0
        self.device_hit_tokens = self.host_hit_tokens = 0

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def next_prompt(self) -> Prompt:
        """The first of the queue."""
        return self._queue[0][0]

    def add(self, prompt: Prompt, ticket: T) -> None:
        self._queue.append((prompt, ticket))

    def begin(self) -> float:
        """Takes the first of the queue; seconds until `end` is to be called."""
        assert self._running is None
        prompt, ticket = self._queue.popleft()
        hashes: list[BlockHash] = prompt.keys.tolist()
        self.cache.tiers.accessed(hashes)
        # The last token is always computed: without it there is no first token of the answer.
        match = self.cache.match(hashes[: (prompt.tokens - 1) // self._block_tokens])
        self.cache.hold(match)
        blocks = self.cache.take(-(-prompt.tokens // self._block_tokens) - len(match.device))
        self._running = _Running(prompt, ticket, hashes, match, blocks)
        device_tokens, host_tokens = (len(each) * self._block_tokens for each in (match.device, match.host))
        self.device_hit_tokens += device_tokens
        self.host_hit_tokens += host_tokens
        service_s = self._costs.prefill_s(prompt.tokens, device_tokens, host_tokens)
        self.busy_s += service_s
        return service_s

    def end(self) -> tuple[Prompt, T]:
        """What ran has ended, and its blocks are published."""
        assert self._running is not None
        running, self._running = self._running, None
        hashes, cached = running.hashes, len(running.match.device)
        self.cache.tiers.let_go(running.match.host, loaded=True)
        # The block of the last token may have been on the device all along.
        first = len(self.cache.match(hashes).device)
        self.cache.publish(hashes, first, running.blocks[first - cached : len(hashes) - cached])
        held = [*running.match.device, *running.blocks]
        self.cache.copy_out(hashes[: len(held)])
        self.cache.free(held)
        self.cache.promote()
        return running.prompt, running.ticket

    def told(self) -> ClaimChange:
        """What has changed in the tiers since the last call."""
        return self.cache.told()

    def check_invariants(self) -> None:
        self.cache.check_invariants()
