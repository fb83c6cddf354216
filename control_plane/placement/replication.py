"""Which hot prefixes are copied to which workers, before those that hold them are saturated. Pure.

A prefix asks its holders for `rate * seconds` of engine time a second: what its requests cost where it is cached, hence
what a further copy would take off them. More than `load` for each holder is too much; then it is copied to the idlest
worker that does not hold it. One that has cooled is forgotten: workers evict their copies like anything cold.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from control_plane.prefix_index.hot_prefix import HotPrefix

# Below this share of the load that made copies, a prefix has cooled.
_COOLED = 0.5
_CLAIMED_AFTER_S = 10.0
_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class Copy:
    """Of a prefix, to a worker."""

    key: int
    chunks: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class Demand:
    """What a prefix asks of the workers that hold it."""

    prefix: HotPrefix
    # Engine time of each of its requests where it is cached.
    request_s: float

    @property
    def load(self) -> float:
        """Engines' seconds a second."""
        return self.prefix.rate * self.request_s


@dataclass(slots=True)
class Replication:
    """Decides one copy at a time."""

    # See the module.
    load: float
    # Copies of a prefix at most, beside the first holder.
    replicas: int
    # By prefix that has not cooled, the workers that it was copied to and when; they claim it themselves soon, or have
    # evicted it.
    copies: dict[int, dict[str, float]] = field(default_factory=dict)
    # Until when not to try a copy that has failed.
    refused: dict[tuple[int, str], float] = field(default_factory=dict)
    given_up: int = 0

    def next_copy(self, demands: Iterable[Demand], queue_s: Mapping[str, float], now_s: float) -> Copy | None:
        """The copy that is needed most; None when none is. queue_s: of each usable prefill worker."""
        by_key = {demand.prefix.key: demand for demand in demands}
        self._give_up_cooled(by_key)
        self.refused = {copy: until_s for copy, until_s in self.refused.items() if until_s > now_s}
        worst: tuple[float, Copy] | None = None
        for key, demand in by_key.items():
            made = [worker for worker, at_s in self.copies.get(key, {}).items() if now_s - at_s < _CLAIMED_AFTER_S]
            holders = {*demand.prefix.device, *demand.prefix.host, *made} & queue_s.keys()
            free = [worker for worker in queue_s if worker not in holders and (key, worker) not in self.refused]
            each = demand.load / max(len(holders), 1)
            if not holders or not free or each <= self.load or len(holders) > self.replicas:
                continue
            target = min(free, key=lambda worker: (queue_s[worker], worker))
            # A copy is made where there is time for it.
            if queue_s[target] < min(queue_s[worker] for worker in holders) + demand.request_s and (
                worst is None or each > worst[0]
            ):
                worst = each, Copy(key, demand.prefix.chunks, target)
        return worst[1] if worst is not None else None

    def made(self, copy: Copy, now_s: float) -> None:
        self.copies.setdefault(copy.key, {})[copy.worker_id] = now_s

    def failed(self, copy: Copy, now_s: float) -> None:
        self.refused[copy.key, copy.worker_id] = now_s + _RETRY_AFTER_S

    def _give_up_cooled(self, demands: Mapping[int, Demand]) -> None:
        for key in [key for key in self.copies if key not in demands or demands[key].load < self.load * _COOLED]:
            del self.copies[key]
            self.given_up += 1
