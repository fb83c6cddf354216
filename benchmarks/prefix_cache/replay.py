"""Hit ratios of prefix caches over a trace, replayed through the very classes that run in a worker.

A request asks for its prefix, gets what hits, evicts for the rest, and ends; blocks count as the trace defines them, a
partial last one among them. There is no time but the order of requests. What a policy does with host memory is part of
it: the stock ones copy everything, as an inclusive second tier would; `rachis` does what a worker does by default.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.prefix_cache.belady import belady
from cluster_core.engine_jobs import NOBODY, TenantShare
from cluster_sim.workloads.traces import Trace, TraceFile, TraceRequest
from kv_transfer.blocks import BlockHash
from kv_transfer.host_memory.block_references import BlockReferences
from kv_transfer.tiers.settings import TierSettings, make_tiers
from kv_transfer.tiers.tier_terms import Admission, TierRules


@dataclass(frozen=True, slots=True)
class HitRatios:
    """Shares of all prompt tokens, and blocks copied to host memory and back; those promoted are among the latter."""

    hit_ratio: float
    device_hit_ratio: float
    host_hit_ratio: float
    blocks_copied_out: int
    blocks_copied_back: int
    blocks_promoted: int

    @property
    def blocks_copied(self) -> int:
        """Between the tiers, in both directions."""
        return self.blocks_copied_out + self.blocks_copied_back


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named policy: its settings, and whether it is told of partial blocks. Equal recipes replay equally."""

    settings: TierSettings
    partial_blocks: bool = True

    def with_host_of(self, host_blocks: int) -> "Recipe":
        """The same, without what it would do with host memory where it has none."""
        return self if host_blocks else replace(self, settings=replace(self.settings, rules=_EVICTION_ONLY))


class Replay:
    """One cache under one trace."""

    def __init__(self, recipe: Recipe, device_blocks: int, host_blocks: int) -> None:
        self.device = BlockReferences(device_blocks)
        self._partial_blocks = recipe.partial_blocks
        self.tiers = make_tiers(recipe.settings, device_blocks, host_blocks, lambda block: self.device.count(block) > 1)
        self._device_tokens = 0
        self._host_tokens = 0
        self._tokens = 0

    def run(self, trace: Trace | TraceFile, on_request: Callable[[], None] = lambda: None) -> HitRatios:
        for request in trace:
            self.serve(request, trace.block_tokens)
            on_request()
        tokens = max(1, self._tokens)
        counters = self.tiers.counters
        return HitRatios(
            (self._device_tokens + self._host_tokens) / tokens,
            self._device_tokens / tokens,
            self._host_tokens / tokens,
            counters.copied_out,
            counters.copied_back,
            counters.promoted,
        )

    def serve(self, request: TraceRequest, block_tokens: int, tenant: TenantShare = NOBODY) -> int:
        """From begin to end. Returns the tokens that hit."""
        tiers, hashes = self.tiers, request.hashes
        full = len(hashes) if self._partial_blocks else request.input_tokens // block_tokens
        tiers.comes(hashes[:full])
        tiers.accessed(hashes[:full], tenant=tenant)
        match = tiers.match(hashes)
        on_device = min(len(match.device) * block_tokens, request.input_tokens)
        hit = min((len(match.device) + len(match.host)) * block_tokens, request.input_tokens)
        self._tokens += request.input_tokens
        self._device_tokens += on_device
        self._host_tokens += hit - on_device
        self.device.refer(match.device)
        tiers.hold(match.host)
        blocks = self._take(len(hashes) - len(match.device))
        tiers.let_go(match.host, loaded=True)
        self._publish(hashes, len(match.device), blocks, tenant)
        held = [*match.device, *blocks]
        while (copy := tiers.worth_copying(hashes[: len(held)])) is not None:
            tiers.copied_out(copy)
        self.device.release(held)
        for block in reversed(held):
            tiers.freed(block)
        if (promotion := tiers.promotion()) is not None:
            before = tiers.match(promotion.hashes).device
            self.device.refer(before)
            blocks = self._take(len(promotion.slots))
            self._publish(promotion.hashes, promotion.first, blocks)
            held = [*before, *blocks]
            self.device.release(held)
            for block in reversed(held):
                tiers.freed(block)
            tiers.promoted(promotion, promotion.hashes[promotion.first :])
        return hit

    def _take(self, number: int) -> list[int]:
        """As many device blocks as can be had, up to that number."""
        while self.device.free < number:
            coldest = self.tiers.coldest_device_block()
            if coldest is None:
                break
            self.tiers.left_device(coldest)
            self.device.release([coldest])
        blocks = self.device.allocate(min(number, self.device.free))
        assert blocks is not None
        return blocks

    def _publish(
        self, hashes: Sequence[BlockHash], first: int, blocks: list[int], tenant: TenantShare = NOBODY
    ) -> None:
        refused = self.tiers.cached(hashes, first, blocks, tenant)
        assert not refused, "requests run one by one: nothing is computed twice"
        self.device.refer(blocks)


_EVERYTHING = TierRules(Admission.EVERYTHING, promotion=False)
_PUBLISHED = TierRules(Admission.SELECTIVE, frequency_threshold=10, promotion=True)
_EVICTION_ONLY = TierRules(Admission.NONE, promotion=False)


def _stock(eviction: str) -> Recipe:
    return Recipe(TierSettings(eviction=eviction, rules=_EVERYTHING))


def _published(eviction: str, rules: TierRules) -> Recipe:
    settings = TierSettings(
        eviction=eviction, half_life_requests=None, max_age_epochs=255, requests_per_epoch=10, rules=rules
    )
    return Recipe(settings)


RECIPES: Mapping[str, Recipe] = {
    "lru": _stock("lru"),
    "lfu": _stock("lfu"),
    "fifo": _stock("fifo"),
    "2q": _stock("2q"),
    "E": _published("hotprefix", _EVICTION_ONLY),
    "A+P": _published("lru", _PUBLISHED),
    "hotprefix": _published("hotprefix", _PUBLISHED),
    # By its name among the ablations.
    "E+A+P": _published("hotprefix", _PUBLISHED),
    # What runs by default. An engine tells of full blocks only.
    "rachis": Recipe(TierSettings(), partial_blocks=False),
}


def replay(
    trace: Trace | TraceFile,
    name: str,
    device_blocks: int,
    host_blocks: int,
    on_request: Callable[[], None] = lambda: None,
) -> HitRatios:
    """One named policy over a trace. Raises KeyError for an unknown name."""
    recipe = RECIPES[name].with_host_of(host_blocks)
    return Replay(recipe, device_blocks, host_blocks).run(trace, on_request)


def optimum(trace: Trace, blocks: int) -> HitRatios:
    """What no policy can surpass that caches every block it computes, in one tier of this size."""
    ratio = belady(trace, blocks).hit_ratio
    return HitRatios(ratio, ratio, 0.0, 0, 0, 0)
