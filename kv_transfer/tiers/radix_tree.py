"""Radix prefix tree over blocks: which prefix lies on the device, in host memory, or in both; how runs part and join.

Who owns what:
    a device block, a host slot   the pool that gave it out; while it is in the tree the tree holds one reference
    a second copy of a block      a spare: it steps in when the first one leaves the device
    what lost its parent          a stray on the device, given up in host memory: it can be reached no more

The tree decides nothing: `kv_transfer.tiers.eviction_order` says what leaves.
Sources: the radix prefix cache of `docs/tiers.md` (corrected: children keyed by block, splits keep the subtree).
"""

from collections.abc import Callable, Iterator, Sequence

from cluster_core.engine_jobs import NOBODY, TenantShare
from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.tiers.owners import Owner, Owners
from kv_transfer.tiers.prefix_runs import Node, PrefixRuns
from kv_transfer.tiers.set_aside import SetAside

# Iterating over the enumeration itself is slow.
_TIERS = (Tier.DEVICE, Tier.HOST)


class RadixTree(PrefixRuns):
    """See the module."""

    def __init__(
        self,
        became_leaf: Callable[[Node, Tier], None] = lambda node, tier: None,
        gone: Callable[[Sequence[BlockHash]], None] = lambda hashes: None,
        host_changed: Callable[[Sequence[BlockHash], bool], None] = lambda hashes, there: None,
        owners: Owners | None = None,
    ) -> None:
        super().__init__(Owners() if owners is None else owners)
        # Called with every run that may have become a leaf of a tier or has changed as one.
        self._became_leaf = became_leaf
        # Called with blocks that lie in no tier any more.
        self._gone = gone
        # Called with blocks that have come to host memory (`there`) or left it.
        self._host_changed = host_changed
        self._aside = SetAside()

    def is_worthless(self, block: int) -> bool:
        """Whether nothing is lost with this device block: a second copy, or one without its parent."""
        return block in self._aside.blocks

    def insert(
        self, tier: Tier, hashes: Sequence[BlockHash], first: int, ids: Sequence[int], tenant: TenantShare = NOBODY
    ) -> list[int]:
        """From block `first` of the prefix on, its blocks lie in these blocks or slots as well.

        tenant: owns those of them that lay in no tier.

        Returns those that the tree does not take: it has such a block already, or the blocks before are not there. On
        the device they are spares or strays from now on; of host slots the caller is the only owner again. To say
        again where a block lies changes nothing, and a stray is one no more if the blocks before it are there now.
        """
        if not ids:
            return []
        node, offset = self._descend(hashes, first, tier)
        if node is None:
            return self._refuse(tier, hashes, first, ids)
        refused: list[int] = []
        at, end = first, first + len(ids)
        while at < end:
            if offset == len(node.hashes):
                child = node.children.get(hashes[at])
                if child is None:
                    self._append(node, tier, hashes[at:end], ids[at - first :], self.owners.of(tenant))
                    break
                node, offset = child, 0
            length = min(node.common_blocks(hashes, at - offset) - offset, end - at)
            if length == 0:
                self._split(node, offset)
                continue
            part = ids[at - first : at - first + length]
            if node.ids[tier] is not None:
                run = node.ids[tier][offset : offset + length]  # type: ignore[index]
                if run != part:
                    refused += self._refuse(tier, hashes, at, part, run)
                offset += length
            else:
                node = self._adopt(node, offset, length, tier, part)
                offset = len(node.hashes)
            at += length
        self._join(node)
        return refused

    def remove(self, tier: Tier, identity: int) -> list[int]:
        """A block or slot leaves its tier. Returns the host slots that nothing can reach any more.

        The tail of a leaf is what should be removed; what can be reached through another only is lost with it.
        """
        if tier is Tier.DEVICE and self._aside.blocks and self._aside.forget(identity):
            return []
        node = self._node_of[tier].get(identity)
        if node is None:
            return []
        ids = node.ids[tier]
        assert ids is not None
        index = len(ids) - 1 if ids[-1] == identity else ids.index(identity)
        if tier is Tier.DEVICE and self._aside.spares and self._replace_by_spare(node, index):
            return []
        if index == len(ids) - 1 > 0 and not node.children and node.ids[1 - tier] is None:
            self._shorten(node, tier, ids)
            return []
        if index:
            node = self._split(node, index, tier)
        if tier is Tier.HOST and len(node.hashes) > 1:
            self._split(node, 1)
        return self._leave(node, tier, identity)

    def clear(self, tier: Tier) -> list[int]:
        """Nothing lies in the tier any more. Returns the host slots that the tree gives up."""
        given_up: list[int] = []
        if tier is Tier.DEVICE:
            self._aside.clear()
        nodes = self.behind(self.root)
        for node in reversed(nodes):
            if node.ids[tier] is not None:
                slots = self._vacate(node, tier)
                given_up += slots if tier is Tier.HOST else ()
                if node.ids == [None, None]:
                    given_up += self._drop(node)
        for node in reversed(nodes):
            self._join(node)
        return given_up

    # Checking.

    def check_invariants(self) -> None:
        counted, nodes, known = [0, 0], 0, list[BlockHash]()
        owned: dict[Owner, list[int]] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            nodes += node is not self.root
            known += node.hashes
            of_owner = owned.setdefault(node.owner, [0, 0, 0])
            of_owner[2] += node is not self.root
            for tier in Tier:
                resident = sum(child.ids[tier] is not None for child in node.children.values())
                assert node.resident_children[tier] == resident, "resident children miscounted"
                ids = node.ids[tier]
                if ids is not None:
                    assert len(ids) == len(node.hashes), "a block without hash"
                    assert all(self._node_of[tier].get(each) is node for each in ids), "a block's node is another"
                    counted[tier] += len(ids)
                    of_owner[tier] += len(ids)
            if node is not self.root:
                assert node.hashes, "an empty run"
                assert node.ids != [None, None], "a run that lies nowhere"
                assert node.parent is not None
                assert node.start == node.parent.end
                assert node.parent.children[node.hashes[0]] is node
                if node.ids[Tier.DEVICE] is not None and node.parent is not self.root:
                    assert node.parent.ids[Tier.DEVICE] is not None, "a device run without its parent on the device"
            stack.extend(node.children.values())
        assert counted == self.blocks == [len(each) for each in self._node_of], "blocks miscounted"
        assert nodes == self.nodes, "runs miscounted"
        assert len(known) == len(self._hashes), "a block is there twice"
        assert set(known) == self._hashes, "blocks of runs and blocks known differ"
        assert not self._aside.blocks.keys() & self._node_of[Tier.DEVICE].keys(), "a stray in the tree"
        self._aside.check_invariants()
        self.owners.check_invariants(owned)

    def items(self, tier: Tier) -> Iterator[tuple[int, BlockHash]]:
        """Every block or slot of the tier with its hash, spares and strays of the device among them."""
        for node in self.runs(tier):
            ids = node.ids[tier]
            assert ids is not None
            yield from zip(ids, node.hashes, strict=True)
        if tier is Tier.DEVICE:
            yield from self._aside.blocks.items()

    # Inside.

    def _descend(self, hashes: Sequence[BlockHash], first: int, tier: Tier) -> tuple[Node | None, int]:
        """Where block `first` goes: a run and the offset in it. None: what lies before it is not there."""
        if not first:
            return self.root, 0
        node, reached = self.root, 0
        for node, length in self.path(hashes[:first]):
            if tier is Tier.DEVICE and node.ids[tier] is None:
                return None, 0
            reached = node.start + length
        return (node, reached - node.start) if reached == first else (None, 0)

    def _append(self, node: Node, tier: Tier, hashes: Sequence[BlockHash], ids: Sequence[int], owner: Owner) -> None:
        run = node.ids[tier]
        if run is not None and not node.children and node.ids[1 - tier] is None and node.owner is owner:
            node.hashes.extend(hashes)
            run.extend(ids)
        else:
            child = Node(node, list(hashes), node.end, owner)
            child.ids[tier] = list(ids)
            node.children[hashes[0]] = child
            node.resident_children[tier] += 1
            self._count_runs(owner, 1)
            node = child
        self._hashes.update(hashes)
        self._take(node, tier, ids, hashes)
        self._became_leaf(node, tier)

    def _adopt(self, node: Node, offset: int, length: int, tier: Tier, ids: Sequence[int]) -> Node:
        """Blocks `offset` to `offset + length` of a run of the other tier lie in this one as well."""
        if offset:
            node = self._split(node, offset)
        if length < len(node.hashes):
            self._split(node, length)
        node.ids[tier] = list(ids)
        assert node.parent is not None
        node.parent.resident_children[tier] += 1
        self._take(node, tier, ids, node.hashes)
        self._became_leaf(node, tier)
        return self._merge(node)

    def _take(self, node: Node, tier: Tier, ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        if tier is Tier.HOST:
            self._host_changed(hashes, True)
        elif self._aside.blocks:
            for each in ids:
                self._aside.forget(each)
        self._node_of[tier].update(dict.fromkeys(ids, node))
        self.blocks[tier] += len(ids)
        self.owners.came(node.owner, tier, len(ids))

    def _split(self, node: Node, index: int, leaving: Tier | None = None) -> Node:
        """What follows the first `index` blocks becomes a run of its own, a child of the rest. Returns it.

        `leaving`: the tier that it is about to leave, so that it is no leaf there.
        """
        assert 0 < index < len(node.hashes)
        tail = Node(node, node.hashes[index:], node.start + index, node.owner)
        del node.hashes[index:]
        tail.children, node.children = node.children, {tail.hashes[0]: tail}
        tail.resident_children, node.resident_children = node.resident_children, [0, 0]
        for child in tail.children.values():
            child.parent = tail
        self._count_runs(node.owner, 1)
        for tier in _TIERS:
            ids = node.ids[tier]
            if ids is None:
                continue
            moved = tail.ids[tier] = ids[index:]
            del ids[index:]
            node.resident_children[tier] = 1
            self._node_of[tier].update(dict.fromkeys(moved, tail))
            if tier is not leaving:
                self._became_leaf(tail, tier)
        return tail

    def _shorten(self, node: Node, tier: Tier, ids: list[int]) -> None:
        """The last block of a run that lies in one tier, with nothing behind it, is gone."""
        del self._node_of[tier][ids.pop()]
        self._count_gone(node, tier, 1)
        lost = (node.hashes.pop(),)
        if tier is Tier.HOST:
            self._host_changed(lost, False)
        self._lose(lost)
        self._became_leaf(node, tier)

    def _join(self, node: Node) -> None:
        """Merges a run with the only one behind it, where they lie in the same tiers and are of one owner."""
        if len(node.children) == 1:
            self._merge(next(iter(node.children.values())))

    def _merge(self, node: Node) -> Node:
        """Joins a run with its parent where nothing sets them apart any more. Returns the run that is left."""
        parent = node.parent
        if parent is None or parent is self.root or len(parent.children) != 1 or parent.owner is not node.owner:
            return node
        if any((parent.ids[tier] is None) != (node.ids[tier] is None) for tier in _TIERS):
            return node
        longer, shorter = (node, parent) if len(node.hashes) > len(parent.hashes) else (parent, node)
        first_hash = parent.hashes[0]
        at = 0 if longer is node else len(longer.hashes)
        longer.hashes[at:at] = shorter.hashes
        for tier in _TIERS:
            ids, run = shorter.ids[tier], longer.ids[tier]
            if ids is None or run is None:
                continue
            run[at:at] = ids
            self._node_of[tier].update(dict.fromkeys(ids, longer))
        shorter.ids = [None, None]
        behind, resident_behind = node.children, node.resident_children
        shorter.children, shorter.resident_children = {}, [0, 0]
        longer.start = parent.start
        longer.parent = parent.parent
        assert longer.parent is not None
        longer.parent.children[first_hash] = longer
        longer.children, longer.resident_children = behind, resident_behind
        for child in longer.children.values():
            child.parent = longer
        self._count_runs(node.owner, -1)
        for tier in _TIERS:
            self._became_leaf(longer, tier)
        return longer

    def _leave(self, node: Node, tier: Tier, removed: int) -> list[int]:
        """A run leaves a tier, and the device also what is behind it. Returns the host slots that are lost with it."""
        parent = node.parent
        assert parent is not None
        given_up: list[int] = []
        leaving = [node] if tier is Tier.HOST else self.behind(node, tier)
        for each in reversed(leaving):
            blocks = self._vacate(each, tier)
            if blocks != [removed]:
                self._aside.add_strays(pair for pair in zip(blocks, each.hashes, strict=True) if pair[0] != removed)
            if each.ids == [None, None]:
                given_up += self._drop(each)
        for each in reversed(leaving):
            self._join(each)
        if parent is not self.root:
            self._join(parent)
            self._became_leaf(parent, tier)
        return given_up

    def _vacate(self, node: Node, tier: Tier) -> list[int]:
        """A run lies in a tier no more. Returns what it has lain in."""
        ids = node.ids[tier]
        assert ids is not None
        for each in ids:
            del self._node_of[tier][each]
        self._count_gone(node, tier, len(ids))
        node.ids[tier] = None
        if tier is Tier.HOST:
            self._host_changed(node.hashes, False)
        assert node.parent is not None
        node.parent.resident_children[tier] -= 1
        return ids

    def _drop(self, node: Node) -> list[int]:
        """Takes a run that lies nowhere out of the tree, with the host runs that only it led to."""
        assert node.parent is not None
        del node.parent.children[node.hashes[0]]
        self._count_runs(node.owner, -1)
        self._lose(node.hashes)
        given_up: list[int] = []
        stack = list(node.children.values())
        node.children = {}
        while stack:
            each = stack.pop()
            stack.extend(each.children.values())
            slots = each.ids[Tier.HOST]
            assert slots is not None
            assert each.ids[Tier.DEVICE] is None
            for slot in slots:
                del self._node_of[Tier.HOST][slot]
            self._count_gone(each, Tier.HOST, len(slots))
            self._host_changed(each.hashes, False)
            given_up += slots
            each.ids = [None, None]
            each.children = {}
            self._count_runs(each.owner, -1)
            self._lose(each.hashes)
        return given_up

    def _count_gone(self, node: Node, tier: Tier, blocks: int) -> None:
        self.blocks[tier] -= blocks
        self.owners.left(node.owner, tier, blocks)

    def _count_runs(self, owner: Owner, more: int) -> None:
        self.nodes += more
        owner.runs += more

    def _lose(self, hashes: Sequence[BlockHash]) -> None:
        self._hashes.difference_update(hashes)
        self._gone(hashes)

    def _refuse(
        self, tier: Tier, hashes: Sequence[BlockHash], first: int, ids: Sequence[int], there: Sequence[int] = ()
    ) -> list[int]:
        """`there`: what the tree has in their place."""
        refused = [(at, each) for at, each in enumerate(ids) if not there or there[at] != each]
        if tier is Tier.DEVICE:
            for at, each in refused:
                self._aside.add_spare(each, hashes[first + at])
        return [each for _, each in refused]

    def _replace_by_spare(self, node: Node, index: int) -> bool:
        spare = self._aside.take_spare(node.hashes[index])
        if spare is None:
            return False
        ids = node.ids[Tier.DEVICE]
        assert ids is not None
        del self._node_of[Tier.DEVICE][ids[index]]
        ids[index] = spare
        self._node_of[Tier.DEVICE][spare] = node
        self._became_leaf(node, Tier.DEVICE)
        return True
