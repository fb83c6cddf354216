"""What the other routers of a service have on each worker, as each of them said last. Pure.

A router whose numbers stand still is gone, or cut off: after a while and several rounds nothing of it counts any more.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from rachis.v1 import worker_pb2 as wire

from cluster_core.tenant_shares import Claimant
from control_plane.fleet.loads import Floats
from control_plane.fleet.tenant_lines import Line, Lines
from control_plane.model.worker_snapshot import WorkerSnapshot


class Share(IntEnum):
    """Rows of what is shared; see `Load`."""

    REQUESTS = 0
    TOKENS = 1
    UNCOMPUTED = 2
    QUEUE_S = 3
    OVERTAKEN = 4
    OVERTAKEN_TOKENS = 5
    AHEAD_S = 6
    DECODING = 7
    DECODING_TOKENS = 8
    COMING = 9
    COMING_TOKENS = 10
    ANSWER_TOKENS = 11
    ARRIVING = 12


# What routers tell of their prompts is an average over about so long.
PREFILL_RATE_MEMORY_S = 20.0
_FADED_S = 10 * PREFILL_RATE_MEMORY_S
# So many rounds without a word are silence.
SILENT_ROUNDS = 4
# Of workers: one for each kind of pool, and one that has just been.
_SELECTIONS = 4

# Of what passes with time.
_SECONDS = [Share.QUEUE_S, Share.AHEAD_S]


@dataclass(slots=True)
class _Router:
    number: int
    heard_s: float
    # By (worker, generation), in rows as above.
    loads: dict[tuple[str, int], Floats]
    lines: dict[tuple[str, int], Lines]
    prefill_rate: float
    prefill_heavy: int


class OtherRouters:
    """Times are this router's, monotonic."""

    def __init__(self, silent_s: float) -> None:
        """silent_s: after which a router is forgotten that says nothing new."""
        self._silent_s = silent_s
        self._routers: dict[str, _Router] = {}
        # Of the selections of workers that are asked for in turn, one of each pool, until somebody has said something.
        self._selected: deque[tuple[Sequence[WorkerSnapshot], Floats]] = deque(maxlen=_SELECTIONS)
        self._heard_s = 0.0
        # Of routers that are gone, or not heard of: what their prompts took, and since when.
        self._gone: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._routers)

    def heard(self, router_id: str, told: wire.RouterLoads, now_s: float) -> None:
        """What a router says; the same number again is nothing new."""
        known = self._routers.get(router_id)
        if known is not None and known.number == told.number:
            return
        loads = {(each.worker_id, each.generation): _figures(_column(each)) for each in told.workers}
        lines = {(each.worker_id, each.generation): _lines(each) for each in told.workers if each.lines}
        [prefill_rate] = _figures([told.prefill_rate])
        self._routers[router_id] = _Router(told.number, now_s, loads, lines, prefill_rate, told.prefill_heavy)
        self._gone.pop(router_id, None)
        self._selected.clear()

    def forget_silent(self, present: Iterable[str], now_s: float, *, every_s: float = 0.0) -> list[str]:
        """Drops routers that are not among those present, or have said nothing new for too long; returns the latter.
        every_s: how often they say something."""
        there, silent_s = set(present), max(self._silent_s, SILENT_ROUNDS * every_s)
        silent = [name for name, router in self._routers.items() if name in there and now_s - router.heard_s > silent_s]
        for name in [*silent, *(self._routers.keys() - there)]:
            if rate := self._routers.pop(name).prefill_rate:
                self._gone[name] = rate, now_s
            self._selected.clear()
        return silent

    def of(self, workers: Sequence[WorkerSnapshot], now_s: float) -> "Floats | None":
        """(rows, workers), all routers together; None where there is no other one. Queues have shrunk since they were
        told of."""
        if not self._routers:
            return None
        known = next((sums for selected, sums in self._selected if selected is workers), None)
        sums = (self._summed_up(workers) if known is None else known).copy()
        sums[_SECONDS] = np.maximum(sums[_SECONDS] - (now_s - self._heard_s), 0.0)
        return sums

    def queue_s(self, worker_id: str, generation: int, now_s: float) -> float:
        """What they have in the queue of one worker."""
        told = (
            router.loads[worker_id, generation][Share.QUEUE_S] - (now_s - router.heard_s)
            for router in self._routers.values()
            if (worker_id, generation) in router.loads
        )
        return float(sum(max(left_s, 0.0) for left_s in told))

    def lines(self, worker_id: str, generation: int) -> list[Lines]:
        """Whose prompts they have there, as they were told of: those of each router that has any."""
        own = (worker_id, generation)
        return [router.lines[own] for router in self._routers.values() if own in router.lines]

    def prefill_rate(self, now_s: float) -> float:
        """Seconds of engine time a second that the prompts take that they have placed of late. What those had that are
        gone fades, as fast as what their clients bring elsewhere comes to count."""
        self._gone = {name: gone for name, gone in self._gone.items() if now_s - gone[1] < _FADED_S}
        fading = (rate * math.exp((at_s - now_s) / PREFILL_RATE_MEMORY_S) for rate, at_s in self._gone.values())
        return sum(router.prefill_rate for router in self._routers.values()) + sum(fading)

    @property
    def prefill_heavy(self) -> int:
        """Workers that decode little, to whoever has most of them."""
        return max((router.prefill_heavy for router in self._routers.values()), default=0)

    def _summed_up(self, workers: Sequence[WorkerSnapshot]) -> Floats:
        self._heard_s = max(router.heard_s for router in self._routers.values())
        sums: Floats = np.zeros((len(Share), len(workers)))
        for column, worker in enumerate(workers):
            for router in self._routers.values():
                load = router.loads.get((worker.worker_id, worker.generation))
                if load is not None:
                    sums[:, column] += load
        self._selected.append((workers, sums))
        return sums


def told_lines(lines: Lines) -> list[wire.TenantLine]:
    return [
        wire.TenantLine(
            tenant=whose.tenant,
            priority=whose.priority,
            weight=line.weight,
            requests=line.requests,
            tokens=line.tokens,
            pending_s=line.pending_s,
        )
        for whose, line in lines.items()
    ]


def _lines(told: wire.WorkerShare) -> Lines:
    """What is no line is none."""
    return {
        Claimant(each.priority, each.tenant): Line(each.requests, each.tokens, each.pending_s, each.weight)
        for each in told.lines
        if 0 < each.pending_s < math.inf and 0 < each.weight < math.inf
    }


def _figures(told: list[float]) -> Floats:
    """What is no number, or less than nothing, counts as not told."""
    column = np.array(told, dtype=np.float64)
    return np.where(np.isfinite(column) & (column >= 0), column, 0.0)


def _column(told: wire.WorkerShare) -> list[float]:
    # A router that tells nothing apart waits for all.
    ahead_s = told.ahead_s if told.HasField("ahead_s") else told.queue_s
    overtaken = told.overtaken_requests, told.overtaken_tokens
    if told.HasField("decodes"):
        its = told.decodes
        decodes = [its.requests, its.tokens, its.coming_requests, its.coming_tokens, its.answer_tokens]
    else:
        decodes = [told.requests - overtaken[0], told.tokens - overtaken[1], *overtaken, 0.0]
    first = told.requests, told.tokens, told.uncomputed_tokens, told.queue_s
    return [*first, *overtaken, ahead_s, *decodes, told.arriving_requests]
