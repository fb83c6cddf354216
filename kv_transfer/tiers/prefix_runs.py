"""The runs of a radix prefix tree, and how a prefix is followed along them: what is read, and changes nothing.

A node is a run of consecutive blocks of one prefix that lie in the same tiers and have one owner; its key is their
hashes, each of which covers everything before it. So two runs agree up to a block exactly if they agree on that block,
and how far they agree is found by bisection. Children are keyed by their first hash: siblings may share tokens of a
block, never a block.

`kv_transfer.tiers.radix_tree` changes the runs.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.tiers.owners import Owner, Owners


class Node:
    """A run of blocks."""

    __slots__ = ("children", "hashes", "ids", "owner", "parent", "resident_children", "start")

    def __init__(self, parent: "Node | None", hashes: list[BlockHash], start: int, owner: Owner) -> None:
        self.parent = parent
        self.owner = owner
        self.hashes = hashes
        # Blocks of the prefix before the run.
        self.start = start
        self.children: dict[BlockHash, Node] = {}
        # By tier, the block or slot of each hash, or None where the run does not lie in that tier.
        self.ids: list[list[int] | None] = [None, None]
        # By tier, how many children lie in it.
        self.resident_children = [0, 0]

    @property
    def end(self) -> int:
        """Blocks of the prefix that ends with this run."""
        return self.start + len(self.hashes)

    def is_leaf(self, tier: Tier) -> bool:
        """Whether the run lies in the tier and nothing that follows it does."""
        return self.ids[tier] is not None and not self.resident_children[tier]

    def common_blocks(self, hashes: Sequence[BlockHash], at: int) -> int:
        """How many blocks of the run equal those of the prefix from block `at` on; the first one does."""
        run = self.hashes
        length = min(len(run), len(hashes) - at)
        if run[length - 1] == hashes[at + length - 1]:
            return length
        return bisect_left(range(length), True, key=lambda index: run[index] != hashes[at + index])


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix that can be had: the first `len(device)` blocks are on the device, then `host` follows."""

    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)


class PrefixRuns:
    """What lies where. See the module."""

    def __init__(self, owners: Owners) -> None:
        self.owners = owners
        self.root = Node(None, [], 0, owners.nobody)
        # By tier, blocks that lie in it.
        self.blocks = [0, 0]
        self.nodes = 0
        self._hashes: set[BlockHash] = set()
        self._node_of: tuple[dict[int, Node], dict[int, Node]] = ({}, {})

    def match(self, hashes: Sequence[BlockHash]) -> Match:
        """What of this prefix is on the device, and what of the rest is in host memory.

        A prompt needs at least one token computed: the caller leaves its last block out where the prompt ends with it.
        """
        device: list[int] = []
        host: list[int] = []
        for node, length in self.path(hashes):
            on_device = node.ids[Tier.DEVICE]
            if on_device is not None and not host:
                device += on_device[:length]
                continue
            in_host = node.ids[Tier.HOST]
            if in_host is None:
                break
            host += in_host[:length]
        return Match(device, host)

    def __len__(self) -> int:
        """Blocks that lie in any tier, each once."""
        return len(self._hashes)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Whether a block lies in any tier, where it can be reached."""
        return block_hash in self._hashes

    def missing(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Those of these blocks that lie in no tier."""
        known = self._hashes
        return [each for each in hashes if each not in known]

    def path(self, hashes: Sequence[BlockHash]) -> Iterator[tuple[Node, int]]:
        """The runs along a prefix, each with how many of its blocks belong to it."""
        node, at, total = self.root, 0, len(hashes)
        while at < total:
            child = node.children.get(hashes[at])
            if child is None:
                return
            length = child.common_blocks(hashes, at)
            yield child, length
            if length < len(child.hashes):
                return
            node, at = child, at + length

    def runs(self, tier: Tier) -> set[Node]:
        """All runs that lie in the tier. O(runs)."""
        return {node for node in self.behind(self.root) if node.ids[tier] is not None}

    def behind(self, node: Node, tier: Tier | None = None) -> list[Node]:
        """A run and all behind it, parents first; with a tier, what can be reached without leaving it."""
        found, stack = [], [node]
        while stack:
            each = stack.pop()
            if each is not self.root:
                found.append(each)
            stack.extend(child for child in each.children.values() if tier is None or child.ids[tier] is not None)
        return found

    def host_roots(self) -> Iterator[Node]:
        """The runs in host memory only whose parent is on the device, or is nothing. O(runs on the device)."""
        stack = [self.root]
        while stack:
            for child in stack.pop().children.values():
                if child.ids[Tier.DEVICE] is None:
                    yield child
                else:
                    stack.append(child)

    def node_of(self, tier: Tier, identity: int) -> Node | None:
        """The run that holds a block or slot. None: the tree does not count on it."""
        return self._node_of[tier].get(identity)

    def is_tail(self, tier: Tier, identity: int) -> bool:
        """Whether a block or slot is the last of a leaf: the only ones that may leave."""
        node = self._node_of[tier].get(identity)
        if node is None or node.resident_children[tier]:
            return False
        ids = node.ids[tier]
        return ids is not None and ids[-1] == identity


def prefix_of(node: Node) -> list[BlockHash]:
    """All hashes from the first block of the prefix to the end of the run."""
    runs = [node.hashes, *(each.hashes for each in ancestors(node))]
    return [block_hash for run in reversed(runs) for block_hash in run]


def ancestors(node: Node) -> Iterator[Node]:
    """The runs before this one, nearest first; the root is the last."""
    each = node.parent
    while each is not None:
        yield each
        each = each.parent
