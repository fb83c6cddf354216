"""Who gives up a block, against dictionaries of owners and a plain search over all leaves."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster_core.engine_jobs import TenantShare
from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.tiers.eviction_policies import Priority
from kv_transfer.tiers.eviction_shares import TAKEN_ALONG, EvictionShares
from kv_transfer.tiers.owners import Owner, Owners
from kv_transfer.tiers.prefix_runs import Node
from kv_transfer.tiers.radix_tree import RadixTree
from tests.examples import examples
from tests.pure.kv_transfer.tiers.test_eviction_order import ScriptedPolicy
from tests.pure.kv_transfer.tiers.test_radix_tree import Prefix, hashes_of

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)
# Empty: of nobody.
NAMES = ("", "a", "b", "c")
WEIGHTS = st.sampled_from([0.0, 1.0, 2.5])
BOTH = (Tier.DEVICE, Tier.HOST)
# Blocks that are in no prompt.
UNKNOWN, PROVEN = -1, -2


class SharesMachine(RuleBasedStateMachine):
    """One tree with blocks of several tenants, the shares of both tiers. What a tenant owns and when it asked is kept
    again here, by block and by name."""

    @initialize(
        weight=st.sampled_from([0.0, 0.3]),
        turnovers=st.integers(0, 2),
        taken_along=st.sampled_from([1, 2, TAKEN_ALONG]),
    )
    def start(self, weight: float, turnovers: int, taken_along: int) -> None:
        self.policy = ScriptedPolicy(weight)
        self.turnovers, self.taken_along = turnovers, taken_along
        self.referenced: set[int] = set()
        self.owners = Owners(turnovers)
        self.tree = RadixTree(lambda node, tier: self.shares[tier].became_leaf(node), owners=self.owners)
        self.shares = {
            tier: EvictionShares(
                self.tree, tier, self.policy, lambda identity: identity in self.referenced, self.is_proven, taken_along
            )
            for tier in Tier
        }
        self.accesses: Counter[BlockHash] = Counter({PROVEN: 2})
        self.owners.on_gone = self.forget
        self.next_id = 0
        self.lying: tuple[set[BlockHash], set[BlockHash]] = (set(), set())
        self.owner_of: dict[BlockHash, str] = {}
        self.weights: dict[str, float] = {}
        self.came = [0, 0]
        self.asked: tuple[dict[str, int], dict[str, int]] = ({}, {})

    def forget(self, owner: Owner) -> None:
        for shares in self.shares.values():
            shares.forget(owner)

    # What is kept again.

    def in_tier(self, tier: Tier) -> set[BlockHash]:
        return {name for identity, name in self.tree.items(tier) if self.tree.node_of(tier, identity) is not None}

    def take_in(self, tenant: str = "", weight: float = 1.0) -> None:
        """What has changed in the tree, which this tenant has done."""
        before = set(self.owner_of)
        after = [self.in_tier(tier) for tier in BOTH]
        there = after[0] | after[1]
        new = there - before
        for tier in BOTH:
            self.came[tier] += len(after[tier] - self.lying[tier])
        self.lying = (after[0], after[1])
        if not self.turnovers:
            tenant = ""
        if new and tenant and tenant not in self.owner_of.values():
            # The blocks that are its own came last.
            self.weights[tenant] = weight or 1.0
            for tier in BOTH:
                self.asked[tier][tenant] = self.came[tier] - len(new & after[tier])
        self.owner_of = {name: self.owner_of.get(name, tenant) for name in there}
        for tier in BOTH:
            for gone in self.asked[tier].keys() - set(self.owner_of.values()):
                del self.asked[tier][gone]

    def is_proven(self, block_hash: BlockHash) -> bool:
        return self.accesses[block_hash] > 1

    def load(self, tenant: str, tier: Tier) -> float:
        return sum(self.owner_of[name] == tenant for name in self.lying[tier]) / self.weights[tenant]

    def bound(self, tier: Tier) -> int:
        return self.turnovers * len(self.lying[tier])

    def let_idle_ones_go(self, tier: Tier) -> None:
        """An eviction takes a few leaves along; a tenant's claim ends once those of the ones before it are."""
        bound = self.bound(tier)
        still = {owner.tenant_id for owner in self.owners.claimants(tier)}
        ended = [tenant for tenant, when in self.asked[tier].items() if self.came[tier] - when >= bound]
        assert still >= self.asked[tier].keys() - set(ended), "a claim ended before its time"
        for tenant in ended:
            if tenant not in still:
                del self.asked[tier][tenant]

    def place(self, node: Node) -> tuple[int, Priority]:
        turn = self.policy.groups().index(self.policy.group(node.hashes[-1]))
        return turn, self.policy.priority(node.hashes[-1], len(node.hashes))

    def leaves_of(self, tier: Tier) -> tuple[list[Node], dict[str, list[Node]]]:
        """Leaves that may leave: those nobody claims, and those of each tenant that claims room."""
        self.let_idle_ones_go(tier)
        unclaimed: list[Node] = []
        claimed: dict[str, list[Node]] = {}
        for node in self.tree.runs(tier):
            ids = node.ids[tier]
            assert ids is not None
            if node.is_leaf(tier) and ids[-1] not in self.referenced:
                owner = self.owner_of[node.hashes[-1]]
                (claimed.setdefault(owner, []) if owner in self.asked[tier] else unclaimed).append(node)
        return unclaimed, claimed

    def next_of(self, tier: Tier) -> Node | None:
        """What leaves next, held against all that may."""
        node = self.shares[tier].coldest()
        unclaimed, claimed = self.leaves_of(tier)
        ended = [tenant for tenant in claimed if self.came[tier] - self.asked[tier][tenant] >= self.bound(tier)]
        leaves = sum(map(len, (unclaimed, *claimed.values())))
        assert not ended or leaves > self.taken_along, "a claim has not ended"
        if node is None:
            assert not unclaimed
            assert not claimed
            return None
        assert any(node in giving and self.place(node) == min(map(self.place, giving)) for giving in
                   self.giving(tier, unclaimed, claimed)), "another leaf goes before"  # fmt: skip
        return node

    def giving(self, tier: Tier, unclaimed: list[Node], claimed: dict[str, list[Node]]) -> list[set[Node]]:
        """The leaves of which the coldest goes next; several answers where tenants or leaves stand equal."""
        found = []
        most = max((self.load(each, tier) for each in claimed), default=0.0)
        unproven = [
            node for each in (unclaimed, *claimed.values()) for node in each
            if not self.is_proven(node.hashes[-1]) and self.owner_of[node.hashes[-1]]
        ]  # fmt: skip
        for tenant, leaves in claimed.items():
            if self.load(tenant, tier) == most:
                coldest = min(map(self.place, leaves))
                for node in leaves:
                    if self.place(node) == coldest:
                        others = unproven if self.is_proven(node.hashes[-1]) else []
                        found.append({*unclaimed, *leaves, *others})
        return found or [set(unclaimed)]

    # What happens.

    @rule(
        prompt=PROMPTS,
        tier=st.sampled_from(Tier),
        referenced=st.booleans(),
        is_there=st.booleans(),
        tenant=st.sampled_from(NAMES),
        weight=WEIGHTS,
    )
    def insert(self, prompt: Prefix, tier: Tier, referenced: bool, is_there: bool, tenant: str, weight: float) -> None:
        """is_there: perhaps, so that second copies come to the device."""
        hashes = hashes_of(prompt)
        match = self.tree.match(hashes)
        first = len(match.device) if tier is Tier.DEVICE and not is_there else 0
        ids = list(range(self.next_id, self.next_id + len(hashes) - first))
        self.next_id += len(ids)
        self.referenced.update(ids if referenced else ())
        refused = self.tree.insert(tier, hashes, first, ids, TenantShare(tenant, weight))
        self.referenced.difference_update(refused if tier is Tier.HOST else ())
        self.take_in(tenant, weight)

    @rule(prompt=PROMPTS, tenant=st.sampled_from(NAMES), weight=WEIGHTS)
    def access(self, prompt: Prefix, tenant: str, weight: float) -> None:
        owner = self.owners.asked(TenantShare(tenant, weight))
        self.policy.accessed(hashes_of(prompt))
        self.accesses.update(hashes_of(prompt))
        assert (owner is not None) == (tenant != "" and tenant in self.owner_of.values())
        if owner is not None:
            self.weights[tenant] = weight or 1.0
            for tier in BOTH:
                self.shares[tier].asked(owner)
                self.asked[tier][tenant] = self.came[tier]

    @rule(prompt=PROMPTS)
    def refer(self, prompt: Prefix) -> None:
        match = self.tree.match(hashes_of(prompt))
        self.referenced.update(match.device + match.host)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.referenced:
            freed = data.draw(st.lists(st.sampled_from(sorted(self.referenced)), unique=True))
            self.referenced.difference_update(freed)
            for each in freed:
                for tier in Tier:
                    self.shares[tier].became_free(each)

    @rule(tier=st.sampled_from(Tier), number=st.integers(1, 5))
    def evict(self, tier: Tier, number: int) -> None:
        for _ in range(number):
            node = self.next_of(tier)
            if node is not None:
                self.tree.remove(tier, self.shares[tier].tail(node))
                self.take_in()

    @rule(data=st.data(), tier=st.sampled_from(Tier))
    def remove_any(self, data: st.DataObject, tier: Tier) -> None:
        there = sorted(identity for identity, _ in self.tree.items(tier))
        if there:
            self.tree.remove(tier, data.draw(st.sampled_from(there)))
            self.take_in()

    @rule(tier=st.sampled_from(Tier))
    def clear(self, tier: Tier) -> None:
        self.tree.clear(tier)
        self.take_in()

    @rule(prompt=PROMPTS, group=st.integers(0, 1), fall=st.integers(0, 5))
    def begin_an_epoch(self, prompt: Prefix, group: int, fall: int) -> None:
        for each in hashes_of(prompt):
            self.policy.members[each] = group
            self.policy.scores[each] = self.policy.scores.get(each, 0) - fall
        self.policy.first_group = group
        self.policy.epoch += 1

    # What has to hold.

    @invariant()
    def who_has_most_gives_its_coldest(self) -> None:
        for tier, shares in self.shares.items():
            node = self.next_of(tier)
            leaves = shares.leaves()
            assert [self.place(each) for _, each in leaves] == sorted(self.place(each) for _, each in leaves)
            assert [self.place(each) for _, each in leaves[:1]] == ([self.place(node)] if node is not None else [])
            unclaimed, claimed = self.leaves_of(tier)
            assert {each for _, each in leaves} in self.giving(tier, unclaimed, claimed)

    @invariant()
    def each_run_has_one_owner_and_each_owner_its_blocks(self) -> None:
        self.tree.check_invariants()
        for node in self.tree.behind(self.tree.root):
            assert {self.owner_of[each] for each in node.hashes} == {node.owner.tenant_id}
        assert len(self.owners) == len(set(self.owner_of.values()) - {""})
        for shares in self.shares.values():
            shares.check_invariants()

    @invariant()
    def nobody_is_owed_more_than_its_share(self) -> None:
        for tier, shares in self.shares.items():
            _, claimed = self.leaves_of(tier)
            loads = {tenant: self.load(tenant, tier) for tenant in claimed}
            for owner in {node.owner for node in self.tree.behind(self.tree.root)}:
                assert not shares.is_owed(UNKNOWN, owner, 1), "what was never asked for is owed"
                if shares.is_owed(PROVEN, owner, 1):
                    after = (owner.blocks[tier] + 2) / self.weights[owner.tenant_id]
                    assert owner.tenant_id in self.asked[tier]
                    assert any(
                        loads[each] == max(loads.values()) and after <= load - 1 / self.weights[each] + 1e-9
                        for each, load in loads.items()
                    )


SharesMachine.TestCase.settings = examples(200, steps=40)
test_who_gives_up_a_block_is_who_a_plain_search_finds = SharesMachine.TestCase
