"""Errors of both tiers that the state machine has to notice."""

from dataclasses import replace

import pytest

from cluster_core.engine_jobs import NOBODY
from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.host_memory.block_references import BlockReferences
from kv_transfer.tiers.owners import Owner
from kv_transfer.tiers.prefix_runs import Node
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.radix_tree import RadixTree
from kv_transfer.tiers.tier_terms import CopyOut
from tests.planting import planted
from tests.pure.kv_transfer.tiers.test_prefix_tiers_machine import TiersMachine
from tests.state_machines import expect_noticed


def a_copy_that_ignores_a_reset(self: PrefixTiers, copy: CopyOut) -> None:
    self._end_copy(copy)
    self._release(self.tree.insert(Tier.HOST, copy.hashes, copy.first, copy.slots))


def a_copy_that_is_nobodys(self: PrefixTiers, copy: CopyOut) -> None:
    COPIED_OUT(self, replace(copy, tenant=NOBODY))


def a_copy_of_several_owners(self: PrefixTiers, hashes: list[BlockHash]) -> tuple[int, list[int], Owner]:
    path = list(self.tree.path(hashes))
    owners = [node.owner for node, _ in path]
    for node, _ in path:
        node.owner = self.tree.owners.nobody
    first, blocks, _ = NOT_IN_HOST(self, hashes)
    for (node, _), owner in zip(path, owners, strict=True):
        node.owner = owner
    return first, blocks, owners[0] if owners else self.tree.owners.nobody


def blocks_that_change_owner_when_they_come_back(
    self: RadixTree, node: Node, offset: int, length: int, tier: Tier, ids: list[int]
) -> Node:
    adopted = ADOPT(self, node, offset, length, tier, ids)
    adopted.owner = adopted.owner if tier is Tier.HOST else self.owners.nobody
    return adopted


def a_copy_that_is_there_before_it_has_landed(self: PrefixTiers, hashes: list[BlockHash]) -> CopyOut | None:
    copy = WORTH_COPYING(self, hashes)
    if copy is not None:
        self.tree.insert(Tier.HOST, copy.hashes, copy.first, copy.slots)
    return copy


def a_match_that_rounds_up(run: Node, hashes: list[BlockHash], at: int) -> int:
    return min(COMMON_BLOCKS(run, hashes, at) + 1, len(run.hashes), len(hashes) - at)


def a_release_that_frees_what_is_read(self: BlockReferences, blocks: list[int]) -> list[int]:
    for block in blocks:
        self._count[block] = min(self._count[block], 1)
    return RELEASE(self, blocks)


# The originals, for the planted ones above.
COMMON_BLOCKS, WORTH_COPYING, RELEASE = Node.common_blocks, PrefixTiers.worth_copying, BlockReferences.release
# Likewise.
COPIED_OUT, NOT_IN_HOST, ADOPT = PrefixTiers.copied_out, PrefixTiers._not_in_host, RadixTree._adopt


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "first_seed"),
    [
        (PrefixTiers, "copied_out", a_copy_that_ignores_a_reset, 1),
        (PrefixTiers, "worth_copying", a_copy_that_is_there_before_it_has_landed, 0),
        (PrefixTiers, "_forget", lambda self, hashes: None, 0),
        (PrefixTiers, "match", lambda self, hashes: self.tree.match(hashes), 0),
        (RadixTree, "_drop", lambda self, node: [], 0),
        (Node, "common_blocks", a_match_that_rounds_up, 0),
        (BlockReferences, "release", a_release_that_frees_what_is_read, 0),
        (PrefixTiers, "copied_out", a_copy_that_is_nobodys, 5),
        (PrefixTiers, "_not_in_host", a_copy_of_several_owners, 3),
        (RadixTree, "_adopt", blocks_that_change_owner_when_they_come_back, 0),
    ],
)
def test_machine_sees_planted_bugs(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, wrong: object, first_seed: int
) -> None:
    planted(monkeypatch, owner, name, wrong)
    expect_noticed(TiersMachine, first_seed=first_seed)
