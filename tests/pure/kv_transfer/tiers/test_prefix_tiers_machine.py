"""Both tiers over memory with content: what matches holds what it should, whatever lands late, fails or is reset."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster_core.engine_jobs import NOBODY, TenantShare
from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.tiers import prefix_tiers as tiers
from kv_transfer.tiers.hotness import HotnessTracker
from kv_transfer.tiers.hotness_filter import HotnessFilter
from kv_transfer.tiers.owners import Owners
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.settings import POLICIES, TierSettings
from kv_transfer.tiers.tier_terms import Admission, CopyOut, Promotion, TierRules
from tests.examples import examples
from tests.pure.kv_transfer.tiers.test_radix_tree import Prefix, hashes_of

AWAITED = 12
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=6).map(tuple)
TENANTS = st.sampled_from(["", "a", "b"])
# Of which model, of which prefix. None: nothing was written yet.
Content = tuple[int, BlockHash] | None


@dataclass(eq=False)
class Running:
    """A request; while `loading`, the blocks behind the first `ready` are not written."""

    hashes: list[int]
    blocks: list[int]
    ready: int
    loading: list[int]
    tenant: str


@dataclass(eq=False)
class Promoting:
    plan: Promotion
    before: list[int]
    blocks: list[int]


class TiersMachine(RuleBasedStateMachine):
    """The pool of device blocks, simulated, and what is in memory.

    `references` are those of requests and copies; `published` is what the pool has a hash of.
    """

    @initialize(
        eviction=st.sampled_from(sorted(POLICIES)),
        admission=st.sampled_from([Admission.EVERYTHING, Admission.SELECTIVE]),
        device_blocks=st.integers(1, 8),
        host_slots=st.integers(0, 6),
        promotion_blocks=st.integers(1, 4),
        turnovers=st.integers(0, 2),
    )
    def start(
        self,
        eviction: str,
        admission: Admission,
        device_blocks: int,
        host_slots: int,
        promotion_blocks: int,
        turnovers: int,
    ) -> None:
        self.most_awaited, tiers.MOST_AWAITED = tiers.MOST_AWAITED, AWAITED
        self.tracker = HotnessTracker(HotnessFilter(1000, max_age_epochs=20), 3)
        self.policy = POLICIES[eviction](TierSettings(), self.tracker, device_blocks + host_slots)
        rules = TierRules(admission, 2, promotion=True, promotion_blocks=promotion_blocks, promotion_pause=0)
        self.references = [0] * device_blocks
        owners = Owners(turnovers)
        self.tiers = PrefixTiers(
            self.policy, self.tracker, rules, host_slots, lambda block: self.references[block] > 0, owners
        )
        # Of blocks in the tree: who brought each first.
        self.owner_of: dict[BlockHash, str] = {}
        self.has_owners = turnovers > 0
        self.device: list[Content] = [None] * device_blocks
        self.host: list[Content] = [None] * host_slots
        self.published: dict[int, BlockHash] = {}
        self.model = 0
        self.running: list[Running] = []
        # Each with whose it was when it began.
        self.copies: list[tuple[CopyOut, str]] = []
        self.promotions: list[Promoting] = []

    def teardown(self) -> None:
        if hasattr(self, "most_awaited"):
            tiers.MOST_AWAITED = self.most_awaited

    def take(self, number: int) -> list[int]:
        """As many blocks as can be had, up to that number, as vLLM's pool would."""
        taken: list[int] = []
        while len(taken) < number:
            unused = [block for block, count in enumerate(self.references) if not count and not self.is_kept(block)]
            block = unused[0] if unused else self.tiers.coldest_device_block()
            if block is None:
                break
            assert not self.references[block], "a block in use is evicted"
            self.tiers.left_device(block)
            self.published.pop(block, None)
            self.references[block] = 1
            self.device[block] = None
            taken.append(block)
        return taken

    def is_kept(self, block: int) -> bool:
        return block in self.published and not self.tiers.tree.is_worthless(block)

    def refer(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.tiers.freed(block)

    def publish(self, hashes: tuple[BlockHash, ...], first: int, blocks: list[int], tenant: TenantShare) -> None:
        self.take_in()
        self.tiers.cached(hashes, first, blocks, tenant)
        self.published.update(zip(blocks, hashes[first:], strict=False))
        self.take_in(tenant.tenant_id)

    def take_in(self, tenant: str = "") -> None:
        """What has come to the tree since is this tenant's."""
        there = {name for tier in Tier for _, name in self.tiers.tree.items(tier) if name in self.tiers.tree}
        self.owner_of = {name: self.owner_of.get(name, tenant if self.has_owners else "") for name in there}

    def is_right(self, contents: list[Content], where: list[int], hashes: list[BlockHash]) -> None:
        for place, block_hash in zip(where, hashes, strict=False):
            assert contents[place] == (self.model, block_hash), "something else lies there"

    @rule(prompt=PROMPTS, loads=st.booleans(), tenant=TENANTS)
    def ask(self, prompt: Prefix, loads: bool, tenant: str) -> None:
        hashes = hashes_of(prompt)
        self.tiers.comes(hashes)
        self.tiers.accessed(hashes, tenant=TenantShare(tenant))
        match = self.tiers.match(hashes)
        self.is_right(self.device, match.device, [*hashes])
        self.is_right(self.host, match.host, [*hashes[len(match.device) :]])
        self.refer(match.device)
        slots = match.host if loads else []
        self.tiers.hold(slots)
        blocks = self.take(len(hashes) - len(match.device))
        if len(blocks) < len(slots):
            self.tiers.let_go(slots, loaded=False)
            slots = []
        request = Running(hashes, [*match.device, *blocks], len(match.device), slots, tenant)
        self.running.append(request)
        if not slots:
            self.compute(request)

    def compute(self, request: Running) -> None:
        for index in range(request.ready, len(request.blocks)):
            self.device[request.blocks[index]] = (self.model, request.hashes[index])
        tenant = TenantShare(request.tenant)
        self.publish(tuple(request.hashes), request.ready, request.blocks[request.ready :], tenant)
        request.ready = len(request.blocks)

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), tenant=TENANTS)
    def serve_from_begin_to_end(self, prompts: list[Prefix], tenant: str) -> None:
        """Requests that meet nobody else, each copied out as far as it is worth it."""
        for prompt in prompts:
            self.ask(prompt, False, tenant)
            request = self.running.pop()
            while (copy := self.tiers.worth_copying(request.hashes[: request.ready])) is not None:
                for slot, block in zip(copy.slots, copy.blocks, strict=True):
                    self.host[slot] = self.device[block]
                self.tiers.copied_out(copy)
            self.release(request.blocks)

    @rule(data=st.data(), loaded=st.booleans())
    def load_ends(self, data: st.DataObject, loaded: bool) -> None:
        loading = [request for request in self.running if request.loading]
        if not loading:
            return
        request = data.draw(st.sampled_from(loading))
        slots, first = request.loading, request.ready
        if loaded:
            self.is_right(self.host, slots, [*request.hashes[first:]])
            for slot, block in zip(slots, request.blocks[first:], strict=False):
                self.device[block] = self.host[slot]
            tenant = TenantShare(request.tenant)
            self.publish(tuple(request.hashes), first, request.blocks[first : first + len(slots)], tenant)
            request.ready += len(slots)
        self.tiers.let_go(slots, loaded=loaded)
        request.loading = []
        self.compute(request)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Also before its load has ended: then what was to be loaded is not written."""
        if self.running:
            request = data.draw(st.sampled_from(self.running))
            self.running.remove(request)
            if request.loading:
                self.tiers.let_go(request.loading, loaded=False)
            self.release(request.blocks)

    @rule(data=st.data())
    def begin_copy_out(self, data: st.DataObject) -> None:
        if not self.running:
            return
        request = data.draw(st.sampled_from(self.running))
        read_or_written = {slot for slot, count in Counter(self.slots_in_use()).items() if count > 1} | {
            slot for copy, _ in self.copies for slot in copy.slots
        }
        copy = self.tiers.worth_copying(request.hashes[: request.ready])
        if copy is not None:
            self.is_right(self.device, list(copy.blocks), list(copy.hashes[copy.first :]))
            assert not read_or_written & set(copy.slots), "a slot in use is given out"
            assert len(copy.hashes) == copy.first + len(copy.blocks) == copy.first + len(copy.slots)
            self.refer(list(copy.blocks))
            (owner,) = {self.owner_of[each] for each in copy.hashes[copy.first :]}
            self.copies.append((copy, owner))

    @rule(data=st.data(), done=st.booleans())
    def copy_out_ends(self, data: st.DataObject, done: bool) -> None:
        if self.copies:
            copy, owner = data.draw(st.sampled_from(self.copies))
            self.copies.remove((copy, owner))
            for slot, block in zip(copy.slots, copy.blocks, strict=True):
                self.host[slot] = self.device[block]
            if done:
                self.take_in()
                self.tiers.copied_out(copy)
                self.take_in(owner)
            else:
                self.tiers.copy_failed(copy)
            self.release(list(copy.blocks))

    @rule()
    def begin_promotion(self) -> None:
        plan = self.tiers.promotion()
        if plan is not None:
            match = self.tiers.match(plan.hashes)
            assert (len(match.device), match.host) == (plan.first, []), "promoted slots are matched"
            self.is_right(self.host, list(plan.slots), list(plan.hashes[plan.first :]))
            self.refer(match.device)
            self.promotions.append(Promoting(plan, match.device, self.take(len(plan.slots))))

    @rule(data=st.data(), done=st.booleans())
    def promotion_ends(self, data: st.DataObject, done: bool) -> None:
        if self.promotions:
            self.end_promotion(data.draw(st.sampled_from(self.promotions)), done)

    def end_promotion(self, promoting: Promoting, done: bool) -> None:
        self.promotions.remove(promoting)
        plan, blocks = promoting.plan, promoting.blocks
        if done:
            self.is_right(self.host, list(plan.slots), list(plan.hashes[plan.first :]))
            for slot, block in zip(plan.slots, blocks, strict=False):
                self.device[block] = self.host[slot]
            self.publish(plan.hashes, plan.first, blocks, NOBODY)
            self.tiers.promoted(plan, plan.hashes[plan.first :])
        else:
            self.tiers.promotion_failed(plan)
        self.release([*promoting.before, *blocks])

    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        """Any block: not only the tails."""
        if self.published:
            block = data.draw(st.sampled_from(sorted(self.published)))
            del self.published[block]
            self.tiers.left_device(block)

    @rule()
    def reset(self) -> None:
        """Requests and loads have to end before; copies out go on."""
        for request in self.running:
            if request.loading:
                self.tiers.let_go(request.loading, loaded=False)
            self.release(request.blocks)
        self.running = []
        for promoting in list(self.promotions):
            self.end_promotion(promoting, False)
        self.tiers.reset()
        self.published = {}
        self.model += 1
        assert self.tiers.tree.nodes == 0

    def slots_in_use(self) -> list[int]:
        """One entry for each reference."""
        return [
            *(slot for slot, _ in self.tiers.tree.items(Tier.HOST)),
            *(slot for copy, _ in self.copies for slot in copy.slots),
            *(slot for request in self.running for slot in request.loading),
            *(slot for promoting in self.promotions for slot in promoting.plan.slots),
        ]

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        self.tiers.check_invariants()
        in_use = self.slots_in_use()
        assert [self.tiers.slots.count(slot) for slot in range(len(self.host))] == [
            in_use.count(slot) for slot in range(len(self.host))
        ]

    @invariant()
    def the_tree_is_right_about_what_lies_where(self) -> None:
        in_tree = dict(self.tiers.tree.items(Tier.DEVICE))
        assert in_tree == self.published
        assert all(self.device[block] == (self.model, name) for block, name in in_tree.items()), "wrong on the device"
        in_host = dict(self.tiers.tree.items(Tier.HOST))
        assert all(self.host[slot] == (self.model, name) for slot, name in in_host.items()), "wrong in host memory"

    @invariant()
    def blocks_are_of_who_brought_them_first(self) -> None:
        self.take_in()
        tree = self.tiers.tree
        found = {name: node.owner.tenant_id for node in tree.behind(tree.root) for name in node.hashes}
        assert found == self.owner_of
        assert len(tree.owners) == len(set(self.owner_of.values()) - {""}), "tenants without blocks are remembered"

    @invariant()
    def whoever_may_leave_is_found(self) -> None:
        tree = self.tiers.tree
        coldest = self.tiers.coldest_device_block()
        evictable = {
            block for block in self.published if tree.is_tail(Tier.DEVICE, block) and not self.references[block]
        }
        assert coldest in evictable if evictable else coldest is None

    @invariant()
    def what_is_known_of_blocks_is_bounded(self) -> None:
        bound = len(self.tiers.tree) + AWAITED
        assert len(self.tracker) <= bound
        known = [
            value for name, value in vars(self.policy).items() if isinstance(value, dict) and name != "_remembered"
        ]
        assert all(len(each) <= bound for each in known)


TiersMachine.TestCase.settings = examples(300, few=6)
test_tiers_never_serve_what_is_not_there = TiersMachine.TestCase
