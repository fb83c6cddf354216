"""Copies between device and host memory that no step waits for, on a thread of their own.

The worker's side of `host_tier`: the scheduler's side keeps the blocks and slots of a copy from all other use until the
copy is reported, so one may take as many steps as it needs. On CUDA the copies run on a stream of their own, too, after
everything that was enqueued before they began. One that raises is reported as failed, and the thread goes on.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from cluster_core.clock import monotonic_s
from kv_transfer.host_memory.host_pool import HostPool
from kv_transfer.host_memory.swap_ledger import SwapCopies

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackgroundCopy:
    """Pairs of blocks and slots, all in one direction."""

    # In reports.
    number: int
    copies: SwapCopies


@dataclass(slots=True)
class CopyReport(KVConnectorWorkerMetadata):
    """Copies that have ended since the last report."""

    # How many workers of the engine say so, by number.
    ended: Counter[int] = field(default_factory=Counter)
    failed: set[int] = field(default_factory=set)
    # What they took, by direction (`out`, `back`), of all workers together.
    seconds: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "CopyReport":
        if not isinstance(other, CopyReport):
            # That of a worker which has more to say; it knows how to add this one.
            return other.aggregate(self)
        return CopyReport(self.ended + other.ended, self.failed | other.failed, self.seconds + other.seconds)


class CopyWorker:
    """See the module."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rachis-copies")
        self._running: list[tuple[BackgroundCopy, Future[float]]] = []
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None

    def begin(self, copies: Sequence[BackgroundCopy]) -> None:
        """Everything these copies read has been written, or is enqueued to be."""
        enqueued = torch.cuda.current_stream(self._pool.device).record_event() if self._stream and copies else None
        for each in copies:
            self._running.append((each, self._thread.submit(self._carry_out, each, enqueued)))

    def report(self) -> CopyReport | None:
        """What has ended since the last call; None: nothing."""
        running, ended = [], CopyReport()
        for copy, future in self._running:
            if not future.done():
                running.append((copy, future))
                continue
            ended.ended[copy.number] += 1
            error = future.exception()
            if error is not None:
                logger.error("a copy between device and host memory failed: %s", error)
                ended.failed.add(copy.number)
            else:
                ended.seconds["out" if copy.copies.out else "back"] += future.result()  # type: ignore[assignment]
        self._running = running
        return ended if ended.ended else None

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _carry_out(self, copy: BackgroundCopy, enqueued: Any) -> float:
        if enqueued is not None:
            enqueued.synchronize()
        began_s = monotonic_s()
        with self._on_stream():
            self._pool.carry_out(copy.copies)
        return monotonic_s() - began_s

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                # One that fails half-way still copies what it has enqueued, and its blocks are given away next.
                self._stream.synchronize()
