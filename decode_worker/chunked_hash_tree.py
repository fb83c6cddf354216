"""The chunked hash tree: which waiting request shares most with the batch that runs.

Source: FEATHER sections 4.2 and A; decision 0022 says what was corrected. Its sets and counts are kept as a trie. The
working set (all prefixes of active requests) is closed under prefixes, so what a waiting request misses is its number
of chunks minus the depth of its deepest active ancestor. Over all active nodes the least of `chunks - depth of the
node` is the least missing count, because a request attains it at its deepest active ancestor. The frontier is a heap of
these, cleaned lazily; for every active node it holds an entry that is no greater than the best that waits below.

Costs: INSERT O(d log C), ADD and FINISH O(d log W), FIND O(1) amortised, for d nodes on a request's path, C chunks and
W waiting requests. None depends on how many waiting requests share a chunk, but for an INSERT that parts a node in two.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from decode_worker.chunk_hashes import ChunkHash
from decode_worker.chunk_trie import NOT_WAITING, SLACK, ChunkTrie, Entry, Node, Request


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request, and what admitting it does."""

    request_id: str
    missing_chunks: int
    # Depths in chunks.
    tip_before: int
    tip_after: int
    # Other waiting requests at the new tip.
    peers: int

    @property
    def loss_chunks(self) -> int:
        return max(0, self.tip_before - self.tip_after)


@dataclass(frozen=True, slots=True)
class PrefixShare:
    """A prefix that active requests share, by the hashes of its chunks; empty where they share none."""

    prefix: Sequence[ChunkHash]
    active: int


# (priority, missing, arrival, serial, request, node)
_FrontierEntry = tuple[int, int, int, int, Request, Node]


class ChunkedHashTree:
    """Requests are waiting or active. An id that is unknown or in the other state raises KeyError."""

    def __init__(self) -> None:
        self._trie = ChunkTrie()
        self._root = self._trie.root
        self._requests: dict[str, Request] = {}
        # Insertion-ordered: any of them will do.
        self._active: dict[str, Request] = {}
        self._active_nodes: set[Node] = {self._root}
        self._frontier: list[_FrontierEntry] = []
        self._arrivals = 0
        self._serials = 0
        self.working_set_chunks = 0

    def insert(
        self, request_id: str, hashes: Sequence[ChunkHash], priority: int = 0, arrival: int | None = None
    ) -> None:
        """A new waiting request. hashes: cumulative, of its chunks; kept, not copied. arrival: breaks ties, least
        first; None: after all others. Raises ValueError for an id that is known."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is in the tree already")
        if arrival is None:
            arrival = self._arrivals
        self._arrivals = max(self._arrivals, arrival + 1)
        node, upper = self._trie.reach(hashes)
        if upper is not None and upper.active:
            self._active_nodes.add(upper)
            best = upper.best()
            if best is not None:
                heapq.heappush(self._frontier, _at(best, upper))
        request = self._requests[request_id] = Request(request_id, priority, arrival, node)
        node.ending += 1
        each: Node | None = node
        while each is not None:
            each.requests += 1
            each = each.parent
        self._set_waiting(request)

    def find_best(self) -> Candidate | None:
        """The waiting request of least priority number, then fewest missing chunks, then earliest arrival."""
        frontier = self._frontier
        while frontier:
            _, missing, _, serial, request, node = frontier[0]
            if node not in self._active_nodes:
                heapq.heappop(frontier)
            elif request.serial != serial:
                best = node.best()
                if best is None:
                    heapq.heappop(frontier)
                else:
                    heapq.heapreplace(frontier, _at(best, node))
            else:
                return self._candidate(request, missing)
        return None

    def candidate(self, request_id: str) -> Candidate:
        """As `find_best`, for a waiting request of one's own choice."""
        request = self._waiting(request_id)
        return self._candidate(request, request.node.end - self._deepest_active(request).end)

    def shared_chunks(self, request_id: str) -> int:
        """How deep a known request's prompt is covered by active requests, itself included."""
        return self._deepest_active(self._requests[request_id]).end

    def potential(self, request_id: str) -> tuple[int, int]:
        """Of a waiting request: (chunks, depth) for the prefix with the most chunks of KV that it and its waiting peers
        would share: depth times peers. (0, 0) where it has none."""
        request = self._waiting(request_id)
        best, node = (0, 0), request.node
        while node.parent is not None:
            best = max(best, (node.end * (node.waiting - 1), node.end))
            node = node.parent
        return best if best[0] else (0, 0)

    def add_to_batch(self, request_id: str) -> None:
        request = self._waiting(request_id)
        self._unset_waiting(request)
        self._active[request_id] = request
        each: Node | None = request.node
        while each is not None:
            each.active += 1
            if each.active == 1 and each.parent is not None:
                self._active_nodes.add(each)
                self.working_set_chunks += each.end - each.start
                best = each.best()
                if best is not None:
                    heapq.heappush(self._frontier, _at(best, each))
            each = each.parent

    def preempt(self, request_id: str) -> None:
        """An active request waits again, in its old turn."""
        self._set_waiting(self._deactivate(request_id))

    def finish(self, request_id: str) -> None:
        self._forget(self._deactivate(request_id))

    def finish_all(self) -> list[str]:
        """As if every active request had finished; these."""
        active = list(self._active)
        for request_id in active:
            self.finish(request_id)
        return active

    def remove(self, request_id: str) -> None:
        """A waiting request is gone."""
        request = self._waiting(request_id)
        self._unset_waiting(request)
        self._forget(request)

    def discard(self, request_id: str) -> bool:
        """A request is gone, whichever it was. False: it was not there."""
        if request_id not in self._requests:
            return False
        if request_id in self._active:
            self.finish(request_id)
        else:
            self.remove(request_id)
        return True

    def waiting_with(self, prefix: Sequence[ChunkHash]) -> int:
        """How many waiting requests have this prefix."""
        node = self._trie.find(prefix)
        return node.waiting if node is not None else 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def is_active(self, request_id: str) -> bool:
        return request_id in self._active

    @property
    def active_requests(self) -> int:
        return len(self._active)

    @property
    def waiting_requests(self) -> int:
        return self._root.waiting

    @property
    def tip_chunks(self) -> int:
        return self._tip().end

    @property
    def tip_hash(self) -> ChunkHash | None:
        return self._tip().last_hash

    @property
    def wanted_tip_chunks(self) -> int:
        """How much of the tip some waiting request has as well."""
        node = self._tip()
        while not node.waiting and node.parent is not None:
            node = node.parent
        return node.end

    def branch(self, request_id: str) -> ChunkHash | None:
        """Where a waiting request parts from all active ones: the first chunks that it shares with its peers, by hash.
        None where it parts from none."""
        node = self._waiting(request_id).node
        while not node.active and node.parent is not None and not node.parent.active and node.parent.parent is not None:
            node = node.parent
        return None if node.active or node.parent is None else node.last_hash

    def shares(self) -> Iterator[PrefixShare]:
        """The active requests by the longest prefix that each shares with another; longest first."""
        members: dict[Node, int] = {}
        for request in self._active.values():
            node = request.node
            while node.active < 2 and node.parent is not None:
                node = node.parent
            # A request that shares nothing stands for itself.
            node = request.node if node is self._root else node
            members[node] = members.get(node, 0) + 1
        for node, active in sorted(members.items(), key=lambda each: -each[0].end):
            yield PrefixShare(node.hashes[: node.end], active)

    def check_invariants(self) -> None:
        """For tests: counts are those of the requests, and every active node's best is in the frontier. O(all)."""
        counts: dict[Node, list[int]] = {}
        for request in self._requests.values():
            waits, runs = request.serial != NOT_WAITING, request.request_id in self._active
            assert waits != runs, f"{request.request_id}: waiting {waits}, active {runs}"
            each: Node | None = request.node
            while each is not None:
                count = counts.setdefault(each, [0, 0, 0])
                for index, value in enumerate((1, waits, runs)):
                    count[index] += value
                each = each.parent
        nodes = list(self._trie.nodes())
        for node in nodes:
            assert [node.requests, node.waiting, node.active] == counts.get(node, [0, 0, 0])
            assert (node.active > 0 or node is self._root) == (node in self._active_nodes)
            assert all(
                key == child.hashes[child.start] and child.start == node.end for key, child in node.children.items()
            )
            assert node is self._root or node.requests, "a node that no request needs"
            assert node is self._root or node.ending or len(node.children) != 1, "two nodes that are one"
            assert len(node.heap) <= 2 * node.waiting + SLACK + 2
            best = node.best()
            if best is not None and node in self._active_nodes:
                least = min(entry[:3] for entry in self._frontier if entry[5] is node)
                assert least <= _at(best, node)[:3], "the frontier misses the best of a node"
        assert self._active_nodes <= set(nodes)
        assert self.working_set_chunks == sum(node.end - node.start for node in self._active_nodes)

    # Along the paths.

    def _tip(self) -> Node:
        for request in self._active.values():
            return self._shared_by_all(request)
        return self._root

    def _shared_by_all(self, request: Request) -> Node:
        """The deepest node on a request's path below which all active requests lie."""
        node = request.node
        while node.active < len(self._active):
            assert node.parent is not None
            node = node.parent
        return node

    def _deepest_active(self, request: Request) -> Node:
        node = request.node
        while not node.active and node.parent is not None:
            node = node.parent
        return node

    # The states.

    def _waiting(self, request_id: str) -> Request:
        request = self._requests[request_id]
        if request.serial == NOT_WAITING:
            raise KeyError(f"{request_id} is active")
        return request

    def _deactivate(self, request_id: str) -> Request:
        request = self._active.pop(request_id)
        node: Node | None = request.node
        while node is not None:
            node.active -= 1
            if not node.active and node.parent is not None:
                self._active_nodes.discard(node)
                self.working_set_chunks -= node.end - node.start
            node = node.parent
        return request

    def _set_waiting(self, request: Request) -> None:
        self._serials += 1
        request.serial = self._serials
        node: Node | None = request.node
        entry = (request.priority, request.node.end, request.arrival, request.serial, request)
        while node is not None:
            node.count_waiting(1)
            heapq.heappush(node.heap, entry)
            if node.heap[0] is entry and node in self._active_nodes:
                heapq.heappush(self._frontier, _at(entry, node))
            node = node.parent
        if len(self._frontier) > 4 * len(self._active_nodes) + SLACK:
            self._frontier = [_at(best, each) for each in self._active_nodes if (best := each.best()) is not None]
            heapq.heapify(self._frontier)

    def _unset_waiting(self, request: Request) -> None:
        request.serial = NOT_WAITING
        node: Node | None = request.node
        while node is not None:
            node.count_waiting(-1)
            node = node.parent

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        joined = self._trie.leave(request.node)
        if joined is not None:
            self._active_nodes.discard(joined)
        # Entries that do not count any more know the request for a while: its hashes need not stay.
        request.node = self._root

    def _candidate(self, request: Request, missing_chunks: int) -> Candidate:
        after = self._shared_by_all(request) if self._active else request.node
        return Candidate(request.request_id, missing_chunks, self._tip().end, after.end, after.waiting - 1)


def _at(entry: Entry, node: Node) -> _FrontierEntry:
    priority, chunks, arrival, serial, request = entry
    return priority, chunks - node.end, arrival, serial, request, node
