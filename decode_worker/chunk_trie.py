"""The trie of chunks under the chunked hash tree: a node for chunks that only the same requests have; how nodes part.

As in a radix tree, chunks that only requests together have make one node; since hashes are cumulative, where two
prompts part is found by bisection. Each node keeps a heap of the waiting requests below it, cleaned lazily: an entry
counts while its request waits under the serial number that it was pushed with.

Costs: O(d log C) to find the node at which a prompt ends, for d nodes on its path and C chunks. A node that parts in
two has its heap copied; otherwise no cost depends on how many requests share a chunk.
"""

import heapq
from collections.abc import Iterator, Sequence

from decode_worker.chunk_hashes import ChunkHash, common_chunks_within

NOT_WAITING = -1
# Entries that a heap may hold beyond twice those that count.
SLACK = 64


class Node:
    """Chunks `start` to `end` of a path."""

    __slots__ = ("active", "children", "end", "ending", "hashes", "heap", "parent", "requests", "start", "waiting")

    def __init__(self, parent: "Node | None", hashes: Sequence[ChunkHash], start: int, end: int) -> None:
        self.parent = parent
        # Of the prompt of any request below.
        self.hashes = hashes
        self.start = start
        self.end = end
        self.children: dict[ChunkHash, Node] = {}
        # Requests that end here; and in the subtree all, those that wait, and those that are active.
        self.ending = self.requests = self.waiting = self.active = 0
        self.heap: list[Entry] = []

    @property
    def last_hash(self) -> ChunkHash | None:
        """It stands for the whole prefix; None for the empty one."""
        return self.hashes[self.end - 1] if self.end else None

    def best(self) -> "Entry | None":
        heap = self.heap
        while heap:
            if heap[0][4].serial == heap[0][3]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def count_waiting(self, change: int) -> None:
        self.waiting += change
        if len(self.heap) > 2 * self.waiting + SLACK:
            # Sorted is a heap, and nearly sorted it is.
            self.heap = sorted(each for each in self.heap if each[4].serial == each[3])

    def __lt__(self, other: object) -> bool:
        """Entries of one request at nodes of one depth, all but one of which are gone, have no order."""
        return False


class Request:
    """A request of the tree, which ends at `node`."""

    __slots__ = ("arrival", "node", "priority", "request_id", "serial")

    def __init__(self, request_id: str, priority: int, arrival: int, node: Node) -> None:
        self.request_id = request_id
        self.priority = priority
        self.arrival = arrival
        self.node = node
        # Of its last entry while it waits.
        self.serial = NOT_WAITING


# (priority, chunks, arrival, serial, request)
Entry = tuple[int, int, int, int, Request]


class ChunkTrie:
    """See the module."""

    def __init__(self) -> None:
        self.root = Node(None, [], 0, 0)

    def reach(self, hashes: Sequence[ChunkHash]) -> tuple[Node, Node | None]:
        """The node at which a prompt of these chunks ends, made where there is none.

        And the upper half of a node that had to part for it, if one had to: as active as the lower one.
        """
        node, chunks = self.root, len(hashes)
        upper = None
        while node.end < chunks:
            child = node.children.get(hashes[node.end])
            if child is None:
                child = Node(node, hashes, node.end, chunks)
                node.children[hashes[node.end]] = child
                return child, upper
            common = common_chunks_within(child.hashes, hashes, child.start + 1, min(child.end, chunks))
            if common < child.end:
                child = upper = self._split(child, common)
            node = child
        return node, upper

    def leave(self, node: Node) -> Node | None:
        """A request that ended here is gone. Returns the node that was put together with its only child, if one was."""
        joined = None
        node.ending -= 1
        each: Node | None = node
        while each is not None:
            each.requests -= 1
            parent = each.parent
            if parent is not None:
                if not each.requests:
                    del parent.children[each.hashes[each.start]]
                elif not each.ending and len(each.children) == 1:
                    self._join(each)
                    joined = each
            each = parent
        return joined

    def find(self, prefix: Sequence[ChunkHash]) -> Node | None:
        """The node below which all requests with this prefix lie. None: no request has it."""
        node = self.root
        while node.end < len(prefix):
            child = node.children.get(prefix[node.end])
            if child is None:
                return None
            last = min(child.end, len(prefix)) - 1
            if child.hashes[last] != prefix[last]:
                return None
            node = child
        return node

    def nodes(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _split(self, node: Node, at: int) -> Node:
        """Parts a node in two; returns the upper one, which all requests below share."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.hashes, node.start, at)
        upper.requests, upper.waiting, upper.active = node.requests, node.waiting, node.active
        upper.heap = node.heap.copy()
        upper.children[node.hashes[at]] = node
        parent.children[node.hashes[node.start]] = upper
        node.parent, node.start = upper, at
        return upper

    def _join(self, node: Node) -> None:
        """Puts a node and its only child together. The child stays: requests end there."""
        (child,) = node.children.values()
        assert node.parent is not None
        child.parent, child.start = node.parent, node.start
        node.parent.children[child.hashes[child.start]] = child
