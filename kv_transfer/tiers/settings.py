"""What a worker's tiers are made of: the policies by name, and the parts put together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kv_transfer.tiers.eviction_policies import (
    DecayedFrequency,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    PublishedFormula,
    TwoQueues,
)
from kv_transfer.tiers.hotness import Formula, HotnessTracker
from kv_transfer.tiers.hotness_filter import HotnessFilter
from kv_transfer.tiers.owners import Owners
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.tier_terms import Admission, TierRules


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Defaults are those of the configuration's section."""

    # A name of `POLICIES`.
    eviction: str = "rachis"
    # Of `hotprefix`.
    formula: str = "frequency + clock / length"
    # Of `rachis`; a guess until it has measured.
    lifetime_requests: int = 500
    novelty_weight: float = 0.33
    # Blocks whose hotness is remembered.
    filter_entries: int = 2**20
    # In which a remembered frequency halves; None: never.
    half_life_requests: int | None = 2000
    # How clocks age.
    max_age_epochs: int = 1024
    requests_per_epoch: int = 4
    # On their way to host memory, at most.
    copy_blocks: int = 64
    # How often a tier is filled anew while a tenant that asks for nothing keeps its share of it; 0: nobody has one.
    tenant_turnovers: int = 4
    rules: TierRules = field(default_factory=TierRules)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "TierSettings":
        """From the configuration's section, whose `admission` to `promotion_blocks` are the rules."""
        rules = {each.name: given[each.name] for each in fields(TierRules) if each.name in given}
        if "admission" in rules:
            rules["admission"] = Admission(rules["admission"])
        return cls(**{name: value for name, value in given.items() if name not in rules}, rules=TierRules(**rules))


# capacity_blocks: of all tiers together.
POLICIES: Mapping[str, Callable[[TierSettings, HotnessTracker, int], EvictionPolicy]] = {
    "lru": lambda settings, tracker, capacity_blocks: LeastRecentlyUsed(),
    "lfu": lambda settings, tracker, capacity_blocks: LeastFrequentlyUsed(),
    "fifo": lambda settings, tracker, capacity_blocks: FirstInFirstOut(),
    "2q": lambda settings, tracker, capacity_blocks: TwoQueues(capacity_blocks),
    "hotprefix": lambda settings, tracker, capacity_blocks: PublishedFormula(tracker, Formula(settings.formula)),
    "rachis": lambda settings, tracker, capacity_blocks: DecayedFrequency(
        tracker, settings.lifetime_requests, settings.novelty_weight
    ),
}


def make_tiers(
    settings: TierSettings, device_blocks: int, host_slots: int, is_referenced: Callable[[int], bool]
) -> PrefixTiers:
    """Raises KeyError for an unknown policy, ValueError for a formula or a filter that cannot be."""
    half_life = settings.half_life_requests
    hotness = HotnessFilter(
        settings.filter_entries,
        max_age_epochs=settings.max_age_epochs,
        frequency_half_life_epochs=half_life and max(1, half_life // settings.requests_per_epoch),
    )
    tracker = HotnessTracker(hotness, settings.requests_per_epoch)
    policy = POLICIES[settings.eviction](settings, tracker, device_blocks + host_slots)
    owners = Owners(settings.tenant_turnovers)
    return PrefixTiers(policy, tracker, settings.rules, host_slots, is_referenced, owners)
