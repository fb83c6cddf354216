"""The two orders that FEATHER compares its tree with: longest prefix match, and depth-first by weight.

Source: FEATHER section 5.3.1, which describes two policies of SGLang. Both work on a radix tree, over tokens as there,
or over chunk hashes: over any sequences of one type that can be sliced and compared. Equal slices are compared at the
speed of C, and where two part is found by bisection, so that little of the cost is the interpreter's.

Longest prefix match walks the tree for every waiting request and sorts: O(W T + W log W). Depth-first by weight counts
the waiting requests below each node and visits the heaviest branch first: O(W + B log B) for B nodes. It asks that each
waiting request has its node, so the tree holds their prompts too.
"""

from collections.abc import Sequence
from typing import Any

# Tokens or chunk hashes.
Prompt = Sequence[Any]


class PrefixNode:
    """edge: what leads here from the parent. children: by the first of their edges."""

    __slots__ = ("children", "edge", "parent")

    def __init__(self, parent: "PrefixNode | None", edge: Prompt) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[Any, PrefixNode] = {}


class PrefixTree:
    """A radix tree that only grows."""

    def __init__(self) -> None:
        self.root = PrefixNode(None, ())

    def insert(self, prompt: Prompt) -> PrefixNode:
        """The node at which the prompt ends; it stays that when edges are split."""
        node, depth = self._walk(prompt)
        if depth < len(prompt):
            child = node.children[prompt[depth]] = PrefixNode(node, prompt[depth:])
            return child
        return node

    def matched(self, prompt: Prompt) -> int:
        """How much of a prompt the tree has."""
        node, depth = self.root, 0
        while depth < len(prompt) and (child := node.children.get(prompt[depth])) is not None:
            common = _common(child.edge, prompt[depth : depth + len(child.edge)])
            depth += common
            if common < len(child.edge):
                break
            node = child
        return depth

    def _walk(self, prompt: Prompt) -> tuple[PrefixNode, int]:
        """The node at the end of what the tree has of a prompt, made by splitting an edge where need be."""
        node, depth = self.root, 0
        while depth < len(prompt) and (child := node.children.get(prompt[depth])) is not None:
            common = _common(child.edge, prompt[depth : depth + len(child.edge)])
            node = child if common == len(child.edge) else _split(child, common)
            depth += common
        return node, depth


def longest_prefix_match(cached: PrefixTree, waiting: Sequence[Prompt]) -> list[int]:
    """Positions in `waiting`: those first of which most is cached, then by arrival."""
    lengths = [cached.matched(prompt) for prompt in waiting]
    return sorted(range(len(waiting)), key=lambda each: -lengths[each])


def depth_first_by_weight(tree: PrefixTree, waiting: Sequence[PrefixNode]) -> list[int]:
    """Positions in `waiting`, which holds the nodes where prompts end. A branch weighs as many as wait in it; equal
    ones go by when they were first inserted, and who ends at a node comes after all who go on from there."""
    ending: dict[PrefixNode, list[int]] = {}
    for position, node in enumerate(waiting):
        ending.setdefault(node, []).append(position)
    nodes = [tree.root]
    for node in nodes:
        nodes.extend(node.children.values())
    weights = {node: len(ending.get(node, ())) for node in nodes}
    for node in reversed(nodes):
        if node.parent is not None:
            weights[node.parent] += weights[node]
    # The last of the order first: a stack hands out the last child first, and a node before its children.
    found: list[int] = []
    stack = [tree.root]
    while stack:
        node = stack.pop()
        found.extend(reversed(ending.get(node, ())))
        stack.extend(sorted(node.children.values(), key=lambda child: -weights[child]))
    found.reverse()
    return found


def _split(node: PrefixNode, at: int) -> PrefixNode:
    """Returns the upper part, which is new."""
    parent = node.parent
    assert parent is not None
    upper = parent.children[node.edge[0]] = PrefixNode(parent, node.edge[:at])
    node.parent, node.edge = upper, node.edge[at:]
    upper.children[node.edge[0]] = node
    return upper


def _common(one: Prompt, other: Prompt) -> int:
    """How long the prefix is that both share."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    least = 0
    while least < most - 1:
        middle = (least + most) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle
    return least
