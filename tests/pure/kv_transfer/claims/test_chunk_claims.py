"""Claims from block events against a plain model of sets: any order, both tiers, branches within chunks."""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster_core.engine_reports import PrefixClaims
from kv_transfer.blocks import Tier
from kv_transfer.claims.chunk_claims import ChunkClaims, extra_keys_of
from kv_transfer.claims.prefix_chunks import chunk_keys, root_key
from tests.counting import Number, lines_run, looks_at
from tests.examples import examples
from tests.planting import planted
from tests.state_machines import expect_noticed

BLOCK_TOKENS = 2
# A block is named by the symbols up to and including its own; each stands for so many tokens.
Prefix = tuple[int, ...]
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=7).map(tuple)
TIERS = st.sampled_from((Tier.DEVICE, Tier.HOST))
SALTS = ("", "tenant")


def root(salt: str, adapter: str) -> int:
    return root_key("service", salt, adapter)


def hash_of(prefix: Prefix, salt: str = "") -> bytes:
    return salt.encode() + bytes(prefix)


def prefix_of(block_hash: bytes) -> tuple[Prefix, str]:
    salt = next(each for each in reversed(SALTS) if block_hash.startswith(each.encode()))
    return tuple(block_hash[len(salt) :]), salt


def parent_of(block_hash: bytes) -> bytes | None:
    prefix, salt = prefix_of(block_hash)
    return hash_of(prefix[:-1], salt) if len(prefix) > 1 else None


def tokens_of(prefix: Prefix) -> list[int]:
    return [symbol * 1000 + place for symbol in prefix for place in range(BLOCK_TOKENS)]


def tell(claims: ChunkClaims, prefix: Prefix, first: int, salt: str = "", tier: Tier = Tier.DEVICE) -> None:
    """An event as vLLM's: the blocks from `first` on, with their tokens."""
    hashes = [hash_of(prefix[: end + 1], salt) for end in range(first, len(prefix))]
    parent = hash_of(prefix[:first], salt) if first else None
    claims.stored(tier, hashes, parent, tokens_of(prefix[first:]), salt if not first else "")


def keys_of(prefix: Prefix, chunk_blocks: int, salt: str = "") -> list[int]:
    keys: list[int] = chunk_keys(tokens_of(prefix), root(salt, ""), chunk_blocks * BLOCK_TOKENS).tolist()
    return keys


class ClaimsMachine(RuleBasedStateMachine):
    """`there`: what lies where. `described`: whose tokens are known. `named`: whose name is."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = ChunkClaims(root, BLOCK_TOKENS, 1)
        self.there: dict[Tier, set[bytes]] = {Tier.DEVICE: set(), Tier.HOST: set()}
        self.described: set[bytes] = set()
        self.named: set[bytes] = set()
        self.told: dict[Tier, set[int]] = {Tier.DEVICE: set(), Tier.HOST: set()}

    @initialize(chunk_blocks=st.integers(1, 3))
    def start(self, chunk_blocks: int) -> None:
        self.claims = ChunkClaims(root, BLOCK_TOKENS, chunk_blocks)

    def settle(self) -> None:
        """Names spread to what follows, and are forgotten with what lies nowhere."""
        anywhere = self.there[Tier.DEVICE] | self.there[Tier.HOST]
        self.described &= anywhere
        self.named &= anywhere
        while new := {
            each
            for each in self.described - self.named
            if parent_of(each) is None or parent_of(each) in self.named
        }:  # fmt: skip
            self.named |= new

    @rule(prompt=PROMPTS, data=st.data(), tier=TIERS, salt=st.sampled_from(SALTS))
    def store(self, prompt: Prefix, data: st.DataObject, tier: Tier, salt: str) -> None:
        """Also child before parent, with an unknown parent, and what is there already."""
        first = data.draw(st.integers(0, len(prompt) - 1))
        hashes = {hash_of(prompt[: end + 1], salt) for end in range(first, len(prompt))}
        tell(self.claims, prompt, first, salt, tier)
        self.there[tier] |= hashes
        self.described |= hashes
        self.settle()

    @rule(data=st.data(), tier=TIERS)
    def copy(self, data: st.DataObject, tier: Tier) -> None:
        """Events between the tiers carry no tokens; what nobody knows may come as well."""
        known = sorted(self.there[Tier.DEVICE] | self.there[Tier.HOST])
        names = st.sampled_from(known) if known else st.nothing()
        block_hash = data.draw(names | PROMPTS.map(hash_of))
        self.claims.stored(tier, [block_hash], None, ())
        self.there[tier].add(block_hash)
        self.settle()

    @rule(data=st.data(), tier=TIERS)
    def remove(self, data: st.DataObject, tier: Tier) -> None:
        """Any block, also one with followers, or one that is not there."""
        known = sorted(self.there[tier])
        block_hash = data.draw((st.sampled_from(known) if known else st.nothing()) | PROMPTS.map(hash_of))
        self.claims.removed(tier, [block_hash])
        self.there[tier].discard(block_hash)
        self.settle()

    @rule(which=st.integers(0, 9))
    def clear(self, which: int) -> None:
        if not which:
            self.claims.cleared()
            for each in self.there.values():
                each.clear()
            self.settle()

    @rule()
    def take(self) -> None:
        change = self.claims.take()
        for tier, states in ((Tier.DEVICE, change.device), (Tier.HOST, change.host)):
            for key, comes in states.items():
                assert comes is (key not in self.told[tier]), "a change that is none"
                (self.told[tier].add if comes else self.told[tier].discard)(key)
        assert not self.claims.take()
        assert PrefixClaims(*map(frozenset, self.told.values())) == self.claims.claims(), "not all was told"

    def expected(self, tier: Tier) -> set[int]:
        size, found = self.claims.chunk_blocks, set()
        for block_hash in self.there[tier]:
            prefix, salt = prefix_of(block_hash)
            if len(prefix) % size == 0:
                chunk = {hash_of(prefix[: end + 1], salt) for end in range(len(prefix) - size, len(prefix))}
                if chunk <= self.there[tier] & self.named:
                    found.add(keys_of(prefix, size, salt)[-1])
        return found

    @invariant()
    def claims_are_the_whole_chunks(self) -> None:
        self.claims.check_invariants()
        claims = self.claims.claims()
        assert claims == PrefixClaims(*(frozenset(self.expected(tier)) for tier in (Tier.DEVICE, Tier.HOST)))
        assert self.claims.audit(self.there[Tier.DEVICE], self.there[Tier.HOST]) == claims
        assert len(self.claims) == len(self.there[Tier.DEVICE] | self.there[Tier.HOST]), "more than what lies anywhere"


ClaimsMachine.TestCase.settings = examples(150, steps=40)
TestClaims = ClaimsMachine.TestCase


@pytest.mark.parametrize("method", ["_count", "_forget", "_find_name", "removed", "cleared"])
def test_a_step_that_is_left_out_is_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, ChunkClaims, method, lambda *arguments, **named: False)
    expect_noticed(ClaimsMachine)


def test_a_chunk_that_lost_an_inner_block_and_is_claimed_still_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, ChunkClaims, "_completeness", lambda self, block: block.there)
    expect_noticed(ClaimsMachine)


def claims_of(chunk_blocks: int = 2, max_orphans: int = 100) -> ChunkClaims:
    return ChunkClaims(root, BLOCK_TOKENS, chunk_blocks, max_orphans)


def test_a_removal_that_is_not_told_is_found_by_the_audit() -> None:
    claims = claims_of()
    tell(claims, (1, 2, 1, 2), 0)
    pool = {hash_of((1, 2, 1, 2)[:end]) for end in (1, 2, 3)}

    assert claims.audit(pool, ()) != claims.claims()
    assert claims.audit(pool, ()).device == set(keys_of((1, 2), 2))


def test_the_audit_believes_the_pool_and_not_what_was_told() -> None:
    claims = claims_of()
    tell(claims, (1, 2), 0)
    # Planted: a claim of blocks that were never there.
    claims._claimed[Tier.HOST][12345] = 1

    assert claims.audit([hash_of((1,)), hash_of((1, 2))], ()) == PrefixClaims(frozenset(keys_of((1, 2), 2)))


def test_blocks_without_their_parents_are_bounded_and_the_oldest_are_forgotten() -> None:
    claims = claims_of(max_orphans=3)
    for symbol in range(1, 6):
        tell(claims, (9, symbol), 1)

    assert (len(claims), claims.nameless_blocks, claims.forgotten_blocks) == (3, 5, 2)
    tell(claims, (9,), 0)
    assert claims.claims().device == {keys_of((9, symbol), 2)[0] for symbol in (3, 4, 5)}
    claims.check_invariants()


def test_what_depends_on_more_than_tokens_is_not_claimed_nor_what_follows() -> None:
    claims = claims_of(chunk_blocks=1)
    prompt = (1, 2, 3)
    tell(claims, prompt, 2)
    claims.stored(Tier.DEVICE, [hash_of(prompt[:1]), hash_of(prompt[:2])], None, tokens_of(prompt[:2]), foreign=[1])

    assert claims.claims().device == set(keys_of(prompt[:1], 1))
    assert claims.foreign_blocks == 2
    claims.removed(Tier.DEVICE, [hash_of(prompt[:end]) for end in (1, 2, 3)])
    assert len(claims) == 0
    claims.check_invariants()


def test_two_block_hashes_of_one_key_are_claimed_until_both_have_left() -> None:
    claims = claims_of(chunk_blocks=1)
    for name in (b"adapter here", b"adapter there"):
        claims.stored(Tier.DEVICE, [name], None, tokens_of((1,)), "", "adapter")

    claims.removed(Tier.DEVICE, [b"adapter here"])
    assert len(claims.claims().device) == 1
    claims.removed(Tier.DEVICE, [b"adapter there"])
    assert not claims.claims().device


def test_an_event_with_too_few_tokens_gives_no_name() -> None:
    claims = claims_of(chunk_blocks=1)
    claims.stored(Tier.DEVICE, [b"x"], None, [1])

    assert claims.claims() == PrefixClaims()
    assert claims.nameless_blocks == 1


def test_a_chunk_that_came_and_left_between_two_takes_is_not_told() -> None:
    claims = claims_of(chunk_blocks=1)
    tell(claims, (1,), 0)
    claims.removed(Tier.DEVICE, [hash_of((1,))])

    assert claims.has_changed
    assert not claims.take()
    assert not claims.has_changed


@pytest.mark.parametrize(
    ("extra_keys", "adapter", "salt", "foreign"),
    [
        (None, "", "", set()),
        ([None, None], "", "", set()),
        ([("salt",), None], "", "salt", set()),
        ([("lora", "salt"), ("lora",)], "lora", "salt", set()),
        ([("lora",), ("lora",)], "lora", "", set()),
        ([("same", "same")], "same", "same", set()),
        ([None, (("image", 3),)], "", "", {1}),
        ([("salt", b"embeds")], "", "salt", {0}),
    ],
)
def test_extra_keys_give_salt_and_foreign_blocks(
    extra_keys: list[tuple[object, ...] | None] | None, adapter: str, salt: str, foreign: set[int]
) -> None:
    assert extra_keys_of(extra_keys, adapter) == (salt, foreign)


def test_many_prompts_behind_one_prefix_cost_no_more_each() -> None:
    """Children of one block that leave in any order."""

    def work(count: int) -> int:
        claims = ChunkClaims(root, 1, 2)
        claims.stored(Tier.DEVICE, [Number(0)], None, [7])
        children = [Number(child) for child in range(1, count + 1)]
        leaving = random.Random(1).sample(children, count)

        def come_and_go() -> None:
            for child in children:
                claims.stored(Tier.DEVICE, [child], 0, [int(child)])
            for child in leaving:
                claims.removed(Tier.DEVICE, [child])

        done = lines_run(lambda: looked.append(looks_at(come_and_go))) + looked[-1]
        assert len(claims) == 1
        return done

    looked: list[int] = []
    assert work(3000) / 3000 < 1.2 * work(300) / 300
