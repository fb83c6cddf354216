"""From block events to claims: which chunks of prefixes lie in which tier, for the index of the cluster.

An engine names blocks by hashes of its own; the index knows chunks of several blocks, by keys that every process
finds alike (`prefix_chunks`). A chunk is claimed in a tier exactly while all its blocks lie there and their
names are known. Of a block, as long as it lies in any tier:
    named       its parent had a name when it came, or has got one since: the key of its chunk can be computed
    nameless    its parent, or what its tokens are, is not known (yet); the oldest are forgotten beyond a bound
    foreign     what was computed here or in front is no matter of tokens, salt and adapter alone: no key says it
Blocks may come before their parents, leave before what follows them, and come back: a name stays with a block whose
parent has gone. The same event twice changes nothing. No I/O, no vLLM.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import numpy as np

from cluster_core.engine_reports import PrefixClaimChange, PrefixClaims
from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.claims.prefix_chunks import next_key

_TOKEN = np.dtype("<u4")


class _Name(Enum):
    NAMED = "named"
    NAMELESS = "nameless"
    FOREIGN = "foreign"


class _Block:
    """A block that lies in a tier, or is about to."""

    __slots__ = ("adapter", "complete", "hash", "key", "name", "parent", "place", "salt", "sibling", "there", "tokens")

    def __init__(self, block_hash: BlockHash) -> None:
        self.hash = block_hash
        self.parent: BlockHash | None = None
        # Packed; of a named block all from the beginning of its chunk, none where it ends the chunk.
        self.tokens: bytes | None = None
        self.salt = self.adapter = ""
        self.name = _Name.NAMELESS
        # Of the chunk that it ends, otherwise of the chunk before, or the root.
        self.key = 0
        # In its chunk, from 0.
        self.place = 0
        # A bit for each tier: it lies in it; all blocks of the chunk up to this one lie in it.
        self.there = self.complete = 0
        # Its place among the children of its parent, -1 without one.
        self.sibling = -1


class ChunkClaims:
    """See the module.

    root: the key that a tenant's first chunk starts from, by cache salt and adapter. block_tokens: of one block.
    chunk_blocks: of one chunk. max_orphans: nameless blocks at most.
    """

    def __init__(
        self, root: Callable[[str, str], int], block_tokens: int, chunk_blocks: int, max_orphans: int = 1 << 16
    ) -> None:
        self.block_tokens = block_tokens
        self.chunk_blocks = chunk_blocks
        # Since the start: came to the device.
        self.stored_blocks = 0
        # Came before their parents or without them.
        self.nameless_blocks = 0
        # Of those, were given up.
        self.forgotten_blocks = 0
        # Are no matter of tokens alone.
        self.foreign_blocks = 0
        self._root = root
        self._max_orphans = max_orphans
        self._blocks: dict[BlockHash, _Block] = {}
        # By the hash of the parent, which may lie nowhere itself.
        self._children: dict[BlockHash, list[_Block]] = {}
        self._nameless: dict[BlockHash, None] = {}
        # By tier, how many complete chunks have a key: two where two adapters go by one name.
        self._claimed: tuple[dict[int, int], dict[int, int]] = ({}, {})
        # By tier, whether what has changed since the last `take` was claimed then.
        self._before: tuple[dict[int, bool], dict[int, bool]] = ({}, {})

    def stored(
        self,
        tier: Tier,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        token_ids: Sequence[int],
        salt: str = "",
        adapter: str = "",
        foreign: Iterable[int] = (),
    ) -> None:
        """These blocks, each the parent of the next, lie in a tier.

        parent: of the first; None: it begins the prompt. token_ids: of all of them; empty where it is known what the
        blocks are, then `parent` counts as little as `salt` and `adapter`, which are those of a prompt's first block.
        foreign: which of the blocks are.
        """
        size, packed = self.block_tokens, b""
        if len(token_ids) == size * len(hashes):
            packed = np.asarray(token_ids, dtype=_TOKEN).tobytes()
        foreign = set(foreign)
        for index, block_hash in enumerate(hashes):
            block = self._blocks.get(block_hash)
            if block is None:
                block = self._blocks[block_hash] = _Block(block_hash)
                self._nameless[block_hash] = None
            if packed and block.name is _Name.NAMELESS and block.tokens is None:
                block.tokens = packed[index * size * _TOKEN.itemsize : (index + 1) * size * _TOKEN.itemsize]
                block.salt, block.adapter = salt, adapter
                block.parent = parent
                if parent is not None:
                    siblings = self._children.setdefault(parent, [])
                    block.sibling = len(siblings)
                    siblings.append(block)
            is_foreign = index in foreign and block.name is _Name.NAMELESS
            if is_foreign:
                self._name_foreign(block)
            if tier is Tier.DEVICE and not block.there >> tier & 1:
                self.stored_blocks += 1
            block.there |= 1 << tier
            self._refresh(block, is_new=is_foreign)
            self.nameless_blocks += block.name is _Name.NAMELESS
            parent = block_hash
        while len(self._nameless) > self._max_orphans:
            self.forgotten_blocks += 1
            self._forget(self._blocks[next(iter(self._nameless))])

    def removed(self, tier: Tier, hashes: Iterable[BlockHash]) -> None:
        """These blocks lie in the tier no more; those that are not known never mattered."""
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is not None:
                block.there &= ~(1 << tier)
                self._refresh(block)
                if not block.there:
                    self._forget(block)

    def cleared(self) -> None:
        """Nothing lies in any tier."""
        for tier in (Tier.DEVICE, Tier.HOST):
            for key in self._claimed[tier]:
                self._before[tier].setdefault(key, True)
            self._claimed[tier].clear()
        self._blocks.clear()
        self._children.clear()
        self._nameless.clear()

    def take(self) -> PrefixClaimChange:
        """What has changed since the last call."""
        device, host = (
            {key: is_claimed for key, was_claimed in before.items() if (is_claimed := key in claimed) != was_claimed}
            for before, claimed in zip(self._before, self._claimed, strict=True)
        )
        for before in self._before:
            before.clear()
        return PrefixClaimChange(device, host)

    @property
    def has_changed(self) -> bool:
        """Whether `take` may have anything to say."""
        return bool(self._before[0] or self._before[1])

    def claims(self) -> PrefixClaims:
        return PrefixClaims(*map(frozenset, self._claimed))

    def audit(self, device_hashes: Iterable[BlockHash], host_hashes: Iterable[BlockHash]) -> PrefixClaims:
        """The claims if these are the blocks that lie in the tiers, found again from them and from names alone."""
        return PrefixClaims(self._audited(frozenset(device_hashes)), self._audited(frozenset(host_hashes)))

    def __len__(self) -> int:
        """Blocks that are known to lie in any tier."""
        return len(self._blocks)

    def check_invariants(self) -> None:
        device, host = (
            [each.hash for each in self._blocks.values() if each.there >> tier & 1] for tier in (Tier.DEVICE, Tier.HOST)
        )
        assert self.audit(device, host) == self.claims(), "claims and blocks disagree"
        assert self._nameless.keys() == {each.hash for each in self._blocks.values() if each.name is _Name.NAMELESS}
        assert len(self._nameless) <= self._max_orphans, "too many nameless blocks"
        assert all(each.there for each in self._blocks.values()), "a block that lies nowhere"
        children = [each for children in self._children.values() for each in children]
        assert len(children) == len(set(children)), "a child twice"
        assert all(self._blocks.get(each.hash) is each for each in children), "a child that lies nowhere"

    def _audited(self, hashes: frozenset[BlockHash]) -> frozenset[int]:
        return frozenset(
            block.key for each in hashes if (block := self._blocks.get(each)) and self._ends(block, hashes)
        )

    def _ends(self, last: _Block, hashes: frozenset[BlockHash]) -> bool:
        """Whether it is the last block of a chunk that lies in `hashes` as a whole."""
        if last.name is not _Name.NAMED or last.place != self.chunk_blocks - 1:
            return False
        block: _Block | None = last
        for place in reversed(range(self.chunk_blocks)):
            if block is None or block.hash not in hashes or block.name is not _Name.NAMED or block.place != place:
                return False
            block = self._blocks.get(block.parent) if block.parent is not None else None
        return True

    def _refresh(self, block: _Block, *, is_new: bool = False) -> None:
        """What a change of this block means for itself and for what follows it. is_new: it has just got a name."""
        stack = [block]
        while stack:
            each = stack.pop()
            is_new |= each.name is _Name.NAMELESS and self._find_name(each)
            complete = self._completeness(each)
            flipped = complete ^ each.complete
            each.complete = complete
            ends_chunk = each.place == self.chunk_blocks - 1
            if flipped and ends_chunk:
                self._count(each, flipped)
            if is_new or (flipped and not ends_chunk):
                stack += self._children.get(each.hash, ())
            is_new = False

    def _find_name(self, block: _Block) -> bool:
        """Whether a block without a name gets one."""
        if block.tokens is None:
            return False
        parent = self._blocks.get(block.parent) if block.parent is not None else None
        if block.parent is None:
            key, before = self._root(block.salt, block.adapter), b""
        elif parent is None or parent.name is _Name.NAMELESS:
            return False
        elif parent.name is _Name.FOREIGN:
            self._name_foreign(block)
            return True
        else:
            key, before = parent.key, parent.tokens or b""
            block.place = (parent.place + 1) % self.chunk_blocks
        del self._nameless[block.hash]
        block.name = _Name.NAMED
        tokens = before + block.tokens
        ends_chunk = block.place == self.chunk_blocks - 1
        block.key = next_key(key, np.frombuffer(tokens, dtype=_TOKEN)) if ends_chunk else key
        block.tokens = None if ends_chunk else tokens
        return True

    def _name_foreign(self, block: _Block) -> None:
        del self._nameless[block.hash]
        block.name, block.tokens = _Name.FOREIGN, None
        self.foreign_blocks += 1

    def _completeness(self, block: _Block) -> int:
        if block.name is not _Name.NAMED:
            return 0
        if not block.place:
            return block.there
        assert block.parent is not None
        parent = self._blocks.get(block.parent)
        return block.there & parent.complete if parent is not None else 0

    def _count(self, block: _Block, flipped: int) -> None:
        """The chunk that this block ends has come to these tiers or left them."""
        for tier in (Tier.DEVICE, Tier.HOST):
            if flipped >> tier & 1:
                claimed, key = self._claimed[tier], block.key
                self._before[tier].setdefault(key, key in claimed)
                count = claimed.get(key, 0) + (1 if block.complete >> tier & 1 else -1)
                if count:
                    claimed[key] = count
                else:
                    del claimed[key]

    def _forget(self, block: _Block) -> None:
        """A block that lies nowhere, or was nameless for too long."""
        del self._blocks[block.hash]
        self._nameless.pop(block.hash, None)
        if block.sibling >= 0:
            assert block.parent is not None
            siblings = self._children[block.parent]
            last = siblings.pop()
            if last is not block:
                siblings[block.sibling], last.sibling = last, block.sibling
            if not siblings:
                del self._children[block.parent]


def extra_keys_of(extra_keys: Sequence[Sequence[Any] | None] | None, adapter: str) -> tuple[str, set[int]]:
    """Of vLLM's extra keys for blocks, one entry each: the cache salt, and which of the blocks are foreign.

    An entry has the name of the adapter, then what else the block depends on besides its tokens; of that the salt,
    which stands with the first block of a prompt only, is the only text.
    """
    salt, foreign = "", set[int]()
    for index, entry in enumerate(extra_keys or ()):
        rest = list(entry or ())
        if adapter and adapter in rest:
            rest.remove(adapter)
        texts = [each for each in rest if isinstance(each, str)]
        if len(texts) < len(rest):
            foreign.add(index)
        salt = texts[0] if texts and not index else salt
    return salt, foreign
