"""A simulated prefill worker: a queue, the real tiers of its caches, and measured costs instead of an engine.

Prompts are prefilled one by one in the order in which they came, each in one go. What is cached is decided by the
classes that decide it online (`kv_transfer.tiers`). Who owns what:
    waiting prompts   the queue; they hold nothing
    the running one   its cached blocks, host slots being loaded and new blocks are referenced from `begin` to `end`
    the rest          the tree refers to it, and gives it up when a prompt that begins needs room
New blocks are published when the prefill has ended. A block counts one copy to host memory, which takes no time here.

What changes in a tier is told as a worker tells it (`kv_transfer.claims`), with the trace's blocks as chunks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from benchmarks.placement_costs import PrefillCosts
from kv_transfer.block_references import BlockReferences
from kv_transfer.claims import ClaimChange
from kv_transfer.prefix_chunks import Keys
from kv_transfer.radix_tree import BlockHash, Match, Tier
from kv_transfer.tier_settings import TierSettings, make_tiers
from kv_transfer.tiers import Admission, TierRules


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
        settings = caches.settings
        if not caches.host_blocks:
            settings = replace(settings, rules=TierRules(Admission.NONE, promotion=False))
        self._block_tokens = caches.block_tokens
        self._costs = costs
        self._device = BlockReferences(caches.device_blocks)
        self.tiers = make_tiers(
            settings, caches.device_blocks, caches.host_blocks, lambda block: self._device.count(block) > 1
        )
        self.tiers.on_host_change = self._host_changed
        self._queue: deque[tuple[Prompt, T]] = deque()
        self._running: _Running[T] | None = None
        # By tier, blocks that have come or gone since the last `told`; the last change counts.
        self._changes: tuple[dict[BlockHash, bool], dict[BlockHash, bool]] = ({}, {})
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
        self.tiers.accessed(hashes)
        # The last token is always computed: without it there is no first token of the answer.
        match = self.tiers.match(hashes[: (prompt.tokens - 1) // self._block_tokens])
        self._device.refer(match.device)
        self.tiers.hold(match.host)
        blocks = self._take(-(-prompt.tokens // self._block_tokens) - len(match.device))
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
        self.tiers.let_go(running.match.host, loaded=True)
        # The block of the last token may have been on the device all along.
        first = len(self.tiers.match(hashes).device)
        self._publish(hashes, first, running.blocks[first - cached : len(hashes) - cached])
        held = [*running.match.device, *running.blocks]
        while (copy := self.tiers.worth_copying(hashes[: len(held)])) is not None:
            self.tiers.copied_out(copy)
        self._free(held)
        if (promotion := self.tiers.promotion()) is not None:
            before = self.tiers.match(promotion.hashes).device
            self._device.refer(before)
            blocks = self._take(len(promotion.slots))
            self._publish(promotion.hashes, promotion.first, blocks)
            self._free([*before, *blocks])
            self.tiers.promoted(promotion, promotion.hashes[promotion.first :])
        return running.prompt, running.ticket

    def told(self) -> ClaimChange:
        """What has changed in the tiers since the last call."""
        device, host = self._changes
        change = ClaimChange(*(_keys(tier, there) for tier in (device, host) for there in (True, False)))
        device.clear()
        host.clear()
        return change

    def check_invariants(self) -> None:
        self.tiers.check_invariants()
        self._device.check_invariants()

    def _take(self, number: int) -> list[int]:
        """As many device blocks as can be had, up to that number."""
        while self._device.free < number:
            coldest = self.tiers.coldest_device_block()
            if coldest is None:
                break
            node = self.tiers.tree.node_of(Tier.DEVICE, coldest)
            assert node is not None
            self._changes[Tier.DEVICE][node.hashes[-1]] = False
            self.tiers.left_device(coldest)
            self._device.release([coldest])
        blocks = self._device.allocate(min(number, self._device.free))
        assert blocks is not None
        return blocks

    def _publish(self, hashes: Sequence[BlockHash], first: int, blocks: list[int]) -> None:
        refused = self.tiers.cached(hashes, first, blocks)
        assert not refused, "prompts run one by one: nothing is computed twice"
        self._device.refer(blocks)
        self._changes[Tier.DEVICE].update(dict.fromkeys(hashes[first : first + len(blocks)], True))

    def _free(self, blocks: list[int]) -> None:
        self._device.release(blocks)
        for block in reversed(blocks):
            self.tiers.freed(block)

    def _host_changed(self, hashes: Sequence[BlockHash], there: bool) -> None:
        self._changes[Tier.HOST].update(dict.fromkeys(hashes, there))


def _keys(changes: dict[BlockHash, bool], there: bool) -> Keys:
    return np.array([each for each, is_there in changes.items() if is_there is there], dtype=np.uint64)
