"""A tenant with hot prefixes beside one that floods the cache: its hits with shares of the tiers and without."""

from dataclasses import replace

import pytest

from benchmarks.prefix_cache.flood import BLOCK_TOKENS, FLOODING, HOT, Chats, Flood, Visitors, hit_ratio
from benchmarks.prefix_cache.replay import RECIPES, Replay
from kv_transfer.blocks import Tier
from kv_transfer.tiers.eviction_shares import EvictionShares
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from tests.planting import planted

SMALL = Flood(requests=32, prefixes=4, prefix_blocks=8, own_blocks=2, device_blocks=200, host_blocks=0)
# All but the first request for each prefix.
MOST = (8 / 10) * (32 - 4) / 32


@pytest.mark.parametrize("policy", ["lru", "rachis"])
def test_hot_prefixes_stay_beside_a_flood_of_prompts_that_look_as_hot(policy: str) -> None:
    flood = replace(SMALL, repeats=3)
    assert hit_ratio(flood, policy, 0) < 0.4 * MOST
    assert hit_ratio(flood, policy, 4) > 0.9 * MOST


def test_both_tiers_keep_a_share() -> None:
    flood = replace(SMALL, host_blocks=200, device_blocks=40)
    assert hit_ratio(flood, "lru", 0) < 0.4 * MOST
    assert hit_ratio(flood, "lru", 4) > 0.9 * MOST


@pytest.mark.parametrize("turnovers", [1, 4, 1000])
def test_tenants_that_come_once_do_not_drive_out_what_is_asked_for_again(turnovers: int) -> None:
    """However long a share is kept: what was asked for once is no share."""
    scene = Visitors(requests=200, share=0.3, prefixes=4, prefix_blocks=16, own_blocks=4, device_blocks=200)
    assert hit_ratio(scene, "rachis", turnovers) >= hit_ratio(scene, "rachis", 0)


CHATS = Chats(requests=150, turns=12, turn_blocks=1)
ALONE = replace(CHATS, flood_prompts=0)


@pytest.mark.parametrize("policy", ["lru", "rachis"])
def test_conversations_hit_beside_a_flood_nearly_as_much_as_alone(policy: str) -> None:
    """Their newest turns, which were asked for once, as well."""
    assert hit_ratio(CHATS, policy, 4) > 0.98 * hit_ratio(ALONE, policy, 4)


@pytest.mark.parametrize("policy", ["lru", "rachis"])
def test_newest_turns_that_are_nobodys_share_are_seen(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, PrefixTiers, "comes", lambda self, hashes: None)
    with pytest.raises(AssertionError):
        test_conversations_hit_beside_a_flood_nearly_as_much_as_alone(policy)


def test_a_share_that_is_ignored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, EvictionShares, "_with_most", lambda self: None)
    with pytest.raises(AssertionError):
        test_hot_prefixes_stay_beside_a_flood_of_prompts_that_look_as_hot("lru")


def test_a_flood_fills_what_nobody_else_asks_for() -> None:
    cache = Replay(RECIPES["rachis"].with_host_of(0), SMALL.device_blocks, 0)
    for tenant, request, _ in SMALL.prompts(0):
        if tenant is FLOODING:
            cache.serve(request, BLOCK_TOKENS, tenant)
    (owner,) = {node.owner for node in cache.tiers.tree.runs(Tier.DEVICE)}
    assert owner.blocks[Tier.DEVICE] == SMALL.device_blocks
    assert cache.tiers.counters.evicted_device_for_others == 0


def test_what_a_tenant_gave_up_for_others_is_counted() -> None:
    cache = Replay(RECIPES["rachis"].with_host_of(0), SMALL.device_blocks, 0)
    for tenant, request, _ in SMALL.prompts(0):
        cache.serve(request, BLOCK_TOKENS, tenant)
    counters = cache.tiers.counters
    assert 0 < counters.evicted_device_for_others <= counters.evicted_device
    held = {node.owner.tenant_id: node.owner.blocks[Tier.DEVICE] for node in cache.tiers.tree.runs(Tier.DEVICE)}
    assert held.keys() == {HOT.tenant_id, FLOODING.tenant_id}
    assert sum(held.values()) == SMALL.device_blocks
