"""Errors of the caches' shares that the state machine has to notice."""

from typing import Any

import pytest

from kv_transfer.blocks import Tier
from kv_transfer.tiers.eviction_order import EvictionOrder
from kv_transfer.tiers.eviction_shares import EvictionShares
from kv_transfer.tiers.owners import Owner, Owners
from kv_transfer.tiers.prefix_runs import Node
from kv_transfer.tiers.radix_tree import RadixTree
from tests.planting import planted
from tests.pure.kv_transfer.tiers.test_eviction_shares_machine import SharesMachine
from tests.state_machines import expect_noticed


def _coldest_of_all(self: EvictionShares) -> Node | None:
    tops = [order.coldest() for order in (self._unclaimed, *self._orders.values())]
    return min((each for each in tops if each is not None), key=self._place, default=None)


def _leaves_without_unproven_ones(self: EvictionShares) -> list[tuple[Any, Node]]:
    giving = _giving_without_unproven_ones(self, self._with_most())
    priorities = {node: each for order in giving for each, node in order.leaves()}
    return [(priorities[node], node) for node in sorted(priorities, key=self._place)]


def _split_of_nobody(self: RadixTree, node: Node, index: int, leaving: object = None) -> Node:
    tail = SPLIT(self, node, index, leaving)  # type: ignore[arg-type]
    tail.owner = self.owners.nobody
    return tail


def _counted_again_when_a_spare_steps_in(self: RadixTree, node: Node, index: int) -> bool:
    stepped_in = REPLACE_BY_SPARE(self, node, index)
    node.owner.blocks[Tier.DEVICE] += stepped_in
    return stepped_in


def _owner_lost_in_the_other_tier(self: RadixTree, tier: Tier, *arguments: Any) -> list[int]:
    return INSERT(self, tier, *(arguments[:3] if tier is Tier.HOST else arguments))


def _owner_changes_with_the_tier(
    self: RadixTree, node: Node, offset: int, length: int, tier: Tier, ids: list[int]
) -> Node:
    adopted = ADOPT(self, node, offset, length, tier, ids)
    adopted.owner = self.owners.nobody
    return adopted


# The originals, for the planted ones above.
SPLIT, REPLACE_BY_SPARE = RadixTree._split, RadixTree._replace_by_spare
INSERT, ADOPT = RadixTree.insert, RadixTree._adopt
# Likewise, for those below.
GIVING, END = EvictionShares._giving, EvictionShares._end


def _giving_without_unproven_ones(self: EvictionShares, most: Owner | None) -> list[EvictionOrder]:
    return [order for order in GIVING(self, most) if order is not self._unproven]


def _giving_without_those_left_behind(self: EvictionShares, most: Owner | None) -> list[EvictionOrder]:
    behind = self._orders.get(self._ending) if self._ending is not None else None
    return [order for order in GIVING(self, most) if order is not behind]


def _leaves_are_left_behind_for_ever(self: EvictionShares, owner: Owner | None, leaves: list[Node]) -> None:
    END(self, owner, leaves[:1])


@pytest.mark.parametrize(
    ("part", "name", "wrong", "first_seed"),
    [
        (EvictionShares, "coldest", _coldest_of_all, 0),
        (EvictionShares, "asked", lambda self, owner: None, 0),
        (EvictionShares, "forget", lambda self, owner: None, 0),
        (EvictionShares, "_let_idle_ones_go", lambda self: None, 1),
        (EvictionShares, "is_owed", lambda self, block, owner, blocks: self._with_most() not in (None, owner), 0),
        (EvictionShares, "_giving", _giving_without_unproven_ones, 19),
        (EvictionShares, "_giving", _giving_without_those_left_behind, 0),
        (EvictionShares, "_end", _leaves_are_left_behind_for_ever, 0),
        (EvictionShares, "leaves", _leaves_without_unproven_ones, 0),
        (Owners, "fallen_idle", lambda self, tier, blocks: None, 1),
        (Owners, "claimants", lambda self, tier: self._by_id.values(), 1),
        (Owner, "load", lambda self, tier: self.blocks[tier], 6),
        (RadixTree, "_split", _split_of_nobody, 0),
        (RadixTree, "_replace_by_spare", _counted_again_when_a_spare_steps_in, 38),
        (RadixTree, "insert", _owner_lost_in_the_other_tier, 0),
        (RadixTree, "_adopt", _owner_changes_with_the_tier, 0),
    ],
)
def test_machine_sees_planted_bugs(
    monkeypatch: pytest.MonkeyPatch, part: object, name: str, wrong: object, first_seed: int
) -> None:
    planted(monkeypatch, part, name, wrong)
    expect_noticed(SharesMachine, first_seed=first_seed)
