"""A sampled check of what pulls bring: the sender takes checksums of blocks while it leases them, the receiver when
they have landed. Pure, but for the checksums (`block_checksums`).

Only full blocks are compared: the last one of a request may still be written to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

# Key that Rachis adds to vLLM's `kv_transfer_params`, see `kv_transfer.handoff.rules`: by rank of the sending engine,
# the checksums of the first blocks; True while they are to come.
CHECKSUMS_PARAM = "rachis_checksums"

# By rank.
Checksums = dict[int, list[int]]


@dataclass(slots=True)
class ContentReport:
    """What workers have found out since their last report, by request; added up over workers."""

    # Of requests that were leased.
    taken: dict[str, Checksums] = field(default_factory=dict)
    # Pulled requests that were compared, and those of them that were not alike.
    verified: set[str] = field(default_factory=set)
    unlike: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.taken or self.verified)

    def __add__(self, other: "ContentReport") -> "ContentReport":
        names = self.taken.keys() | other.taken.keys()
        taken = {name: self.taken.get(name, {}) | other.taken.get(name, {}) for name in names}
        return ContentReport(taken, self.verified | other.verified, self.unlike | other.unlike)


@dataclass(slots=True)
class ContentOrders:
    """What the scheduler wants of the workers in a step, by request."""

    # Blocks to take the checksums of.
    take: dict[str, list[int]] = field(default_factory=dict)
    # By rank, blocks that are being pulled, each with what it should hold.
    compare: dict[str, dict[int, list[tuple[int, int]]]] = field(default_factory=dict)


class ContentSampling:
    """The scheduler's side of one engine. share: of hand-offs that are checked. ranks: of the engine."""

    def __init__(self, share: float, block_size: int, ranks: int, rng: Random | None = None) -> None:
        self.verified = 0
        self.unlike = 0
        self._share = share
        self._block_size = block_size
        self._ranks = ranks
        self._rng = rng or Random()
        self._orders = ContentOrders()
        # Of leases whose checksums somebody waits for.
        self._taken: dict[str, Checksums] = {}
        # Of pulls that have not ended in every worker: whether what they brought is alike, as far as was told.
        self._alike: dict[str, bool] = {}

    def lease(self, request_id: str, block_ids: Sequence[int], tokens: int) -> bool:
        """Whether the blocks of a request that is leased are checked. tokens: whose KV they hold."""
        full = block_ids[: tokens // self._block_size]
        if not full or self._rng.random() >= self._share:
            return False
        self._orders.take[request_id] = list(full)
        self._taken[request_id] = {}
        return True

    def taken(self, request_id: str) -> Checksums | None:
        """The checksums of a leased request, once; None: not all of them are there."""
        if len(self._taken.get(request_id, ())) < self._ranks:
            return None
        return self._taken.pop(request_id)

    def forget(self, request_id: str) -> None:
        """Nobody waits for the checksums of a lease."""
        self._taken.pop(request_id, None)
        self._orders.take.pop(request_id, None)

    def pull(self, request_id: str, sent: Any, block_ids: Sequence[int], pulled: set[int]) -> None:
        """sent: the checksums that came with a hand-off, by rank. block_ids: of the request. pulled: those of them that
        the pull writes into."""
        match sent:
            case Mapping() if len(sent) == self._ranks:
                self._orders.compare[request_id] = {
                    int(rank): [
                        (block, checksum)
                        for block, checksum in zip(block_ids, checksums, strict=False)
                        if block in pulled
                    ]
                    for rank, checksums in sent.items()
                }

    def take_orders(self) -> ContentOrders:
        orders, self._orders = self._orders, ContentOrders()
        return orders

    def take_in(self, report: ContentReport) -> None:
        for name, checksums in report.taken.items():
            if name in self._taken:
                self._taken[name] |= checksums
        for name in report.verified:
            self._alike[name] = self._alike.get(name, True) and name not in report.unlike

    def ended(self, request_id: str) -> None:
        """A pull has ended in every worker: it counts once."""
        is_alike = self._alike.pop(request_id, None)
        self.verified += is_alike is not None
        self.unlike += is_alike is False


class ContentChecks:
    """The worker's side, of one rank."""

    def __init__(self, checksums_of: Callable[[Sequence[int]], list[int]], rank: int) -> None:
        """checksums_of: these blocks."""
        self._checksums_of = checksums_of
        self._rank = rank
        self._expected: dict[str, list[tuple[int, int]]] = {}
        self._report = ContentReport()

    def carry_out(self, orders: ContentOrders) -> None:
        for name, blocks in orders.take.items():
            self._report.taken[name] = {self._rank: self._checksums_of(blocks)}
        for name, by_rank in orders.compare.items():
            self._expected[name] = by_rank.get(self._rank, [])

    def landed(self, request_id: str) -> bool:
        """Whether the blocks of a pull that has ended hold what they should, as far as anybody said what that is."""
        expected = self._expected.pop(request_id, None)
        if not expected:
            return True
        found = self._checksums_of([block for block, _ in expected])
        is_alike = found == [checksum for _, checksum in expected]
        self._report.verified.add(request_id)
        if not is_alike:
            self._report.unlike.add(request_id)
        return is_alike

    def forget(self, request_id: str) -> None:
        """The pull is given up."""
        self._expected.pop(request_id, None)

    def report(self) -> ContentReport:
        """Since the last call."""
        report, self._report = self._report, ContentReport()
        return report
