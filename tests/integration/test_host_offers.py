"""What requests offer to host memory: all that a step has computed, again where it changes, and nothing without an end.

The host tier and the tiers themselves, over a pool that counts references and workers whose reports are made up.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer.blocks import Tier
from kv_transfer.host_memory.copy_worker import BackgroundCopy, CopyReport
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.settings import TierSettings, make_tiers
from kv_transfer.tiers.tier_terms import Admission, TierRules
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE

pytestmark = pytest.mark.integration


class Pool:
    """Of vLLM's, with all blocks in use."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=1) for number in range(64)]
        self.unwritten: set[int] = set()

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1


class World:
    def __init__(self, budget: int = 64) -> None:
        pool: Any = Pool()
        settings = TierSettings(eviction="lru", rules=TierRules(admission=Admission.EVERYTHING, promotion=False))
        self.tiers: Any = make_tiers(settings, 64, 32, lambda block: pool.blocks[block].ref_cnt > 0)
        self.requests: dict[str, Any] = {}
        self.tier = HostTier(
            self.tiers, pool, self.requests, BLOCK_SIZE, budget=budget, workers=1, goes_async=lambda *_: False
        )
        self._blocks = 0

    def computes(self, name: str, hashes: list[Any], *, finished: bool = False) -> None:
        """A step computes these blocks of a request."""
        self.tiers.accessed(hashes)
        first = len(self.tiers.match(hashes).device)
        self.tiers.cached(hashes, first, list(range(self._blocks, self._blocks + len(hashes) - first)))
        self._blocks += len(hashes) - first
        request = self.requests.setdefault(name, SimpleNamespace(request_id=name))
        request.num_computed_tokens, request.block_hashes = len(hashes) * BLOCK_SIZE, hashes
        request.is_finished = lambda: finished
        self.step(name)

    def step(self, *names: str) -> None:
        output: Any = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1), scheduled_new_reqs=[])
        self.tier.built(output)

    def lands(self, copies: list[BackgroundCopy], *, failed: bool = False) -> None:
        numbers = [each.number for each in copies]
        self.tier.take_in(CopyReport(Counter(numbers), set(numbers) if failed else set()))

    @property
    def in_host_memory(self) -> set[Any]:
        return {hashed for _, hashed in self.tiers.tree.items(Tier.HOST)}


def test_a_prompt_of_the_same_length_in_place_of_another_is_offered_as_well() -> None:
    world = World()
    world.computes("session", [1, 2, 3, 4])
    world.lands(world.tier.background())
    world.computes("session", [1, 12, 13, 14])
    world.lands(world.tier.background())
    assert world.in_host_memory == {1, 2, 3, 4, 12, 13, 14}
    world.step("session")
    assert world.tier.background() == [], "once each"


def test_what_waits_for_its_turn_is_copied_after_its_request_was_preempted_as_well() -> None:
    world = World(budget=1)
    world.computes("preempted", [1, 2, 3, 4])
    for _ in range(4):
        begun = world.tier.background()
        world.step("preempted")
        world.lands(begun)
        world.requests["preempted"].num_computed_tokens = 0
    assert world.in_host_memory == {1, 2, 3, 4}


def test_a_copy_that_fails_is_not_tried_until_somebody_asks_again() -> None:
    world = World(budget=2)
    world.computes("long", [1, 2, 3, 4], finished=True)
    tried = 0
    for _ in range(20):
        begun = world.tier.background()
        tried += len(begun)
        world.step()
        world.lands(begun, failed=True)
    assert (tried, world.tier.has_work) == (1, False)
    world.computes("again", [1, 2, 3, 4], finished=True)
    for _ in range(2):
        begun = world.tier.background()
        world.step()
        world.lands(begun)
    assert world.in_host_memory == {1, 2, 3, 4}


def test_what_others_have_offered_is_copied_though_a_copy_fails() -> None:
    world = World(budget=2)
    world.computes("fails", [1, 2], finished=True)
    begun = world.tier.background()
    for name, hashes in (("longer", [1, 2, 3]), ("other", [11, 12])):
        world.computes(name, hashes, finished=True)
        assert world.tier.background() == [], "two blocks are on their way"
    world.step()
    world.lands(begun, failed=True)
    for _ in range(3):
        begun = world.tier.background()
        world.step()
        world.lands(begun)
    assert world.in_host_memory == {11, 12}
