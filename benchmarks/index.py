"""What a placement decision and a block event cost a router whose index is full: `rachis bench index`.

An index of so many entries over so many workers, built by the batches that workers would send. Then decisions for
prompts of 32k tokens, given as packed arrays: hashing, lookup, scoring of all workers, and the choice; each prompt
another one, so that nothing is found in the processor's caches that would not be there in service. Events: batches that
store and remove claims in the full index, decoded from what travels. No Redis and no network is in it.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from benchmarks.measuring_process import Reports, foreign_cpu_s
from cluster_configs.schema import PlacementSection
from cluster_core.clock import monotonic_s
from cluster_core.ids import RequestId
from control_plane.fleet.membership import Membership
from control_plane.model.job import Job
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.placer import Placer
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.claims import ClaimBatch, ClaimChange, decode_batch, encode_batch

PROMPT_TOKENS = 32_768
CHUNK_TOKENS = 128
_HALF_LIFE_S = 600.0
_VOCABULARY = 128_000
_BLOCK_TOKENS = 16
BATCH_KEYS = 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked of an index, and of which size it is at least."""

    prompts: int = 500
    decisions: int = 4_000
    batches: int = 500
    # Below, the prompts alone would not fit.
    least_entries: int = 200_000


SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """Times in microseconds."""

    entries: int
    workers: int
    # The decision, with hashing and lookup.
    placement_p50_us: float
    placement_p99_us: float
    # What follows the decision, until the request has ended.
    accounting_p50_us: float
    hashing_p50_us: float
    lookup_p50_us: float
    events_per_s: float
    # By which the process has grown for the full index.
    bytes_per_entry: float


@dataclass(frozen=True, slots=True)
class IndexBench:
    """The index at the size that was asked for, and at others."""

    figures: IndexFigures
    # With fewer entries.
    by_entries: tuple[IndexFigures, ...]
    # With other pools.
    by_workers: tuple[IndexFigures, ...]
    foreign_cores: float


class IndexWorld:
    """A router's index with `entries` chunks, each held by one or two of the workers."""

    def __init__(self, entries: int, workers: int, seed: int, sizes: Sizes = SIZES) -> None:
        self._sizes = sizes
        self._random = np.random.default_rng(seed)
        self._names = [f"prefill-{number}" for number in range(workers)]
        self.membership = Membership()
        self.membership.replace([_registration(name) for name in self._names])
        self.index = PrefixIndex(entries, _HALF_LIFE_S)
        for name in self._names:
            self.index.join(name, 1)
        self._placer = Placer(
            self.membership,
            IndexPorts(self.index),
            PlacementSection(),
            service_id="bench",
            chunk_tokens=CHUNK_TOKENS,
            rng=random.Random(seed),
        )
        self._prompts = [
            self._random.integers(0, _VOCABULARY, PROMPT_TOKENS).astype(np.uint32) for _ in range(sizes.prompts)
        ]
        self._decisions = 0

    def fill(self, entries: int, progress: Callable[[int], None]) -> None:
        """Prompts first: each lies on one worker in full and on another in part. Then prefixes that nobody asks for."""
        for prompt in self._prompts:
            keys = self._placer.packed(prompt, PrefixScope()).keys
            whole, part = self._random.choice(len(self._names), 2, replace=len(self._names) < 2)
            self.index.apply(self._names[whole], ClaimChange(device_stored=keys))
            begun = keys[: int(self._random.integers(1, len(keys)))]
            self.index.apply(self._names[part], ClaimChange(host_stored=begun))
        while (missing := entries - self.index.entries) > 0:
            keys = self._keys(min(missing, 8 * BATCH_KEYS))
            holders = min(int(self._random.integers(1, 3)), len(self._names))
            for name in self._random.choice(self._names, holders, replace=False):
                self.index.apply(str(name), ClaimChange(device_stored=keys))
            progress(len(keys))

    def ask(self) -> None:
        """The next request arrives."""
        self._decisions += 1
        name = RequestId(f"r{self._decisions}")
        # A packed array, which a job's list of tokens is turned into otherwise.
        prompt: Any = self._prompts[self._decisions % len(self._prompts)]
        sampling = generation.SamplingParams(max_tokens=8)
        self._job = Job(name, prompt, sampling, RequestLifecycle(name), 0.0, math.inf)

    def decide(self) -> None:
        """Its placement on the prefill pool."""
        self.placement = self._placer.place(self._job, wire.POOL_PREFILL)

    def account(self) -> None:
        """It is sent out, and ends: what is in flight, and what is predicted to be where."""
        assert self.placement is not None
        self._placer.begin(self.placement).end()

    def hash(self) -> None:
        self._decisions += 1
        self._placer.packed(self._prompts[self._decisions % len(self._prompts)], PrefixScope())

    def look_up(self) -> None:
        self._decisions += 1
        self.index.lookup(self.hashed[self._decisions % len(self.hashed)])

    def prepare_lookups(self) -> None:
        self.hashed = [self._placer.packed(prompt, PrefixScope()).keys for prompt in self._prompts]

    def batches(self) -> list[tuple[str, bytes]]:
        """Encoded batches of workers, in pairs: chunks come, and leave again."""
        found = []
        for sequence in range(1, self._sizes.batches, 2):
            name = str(self._random.choice(self._names))
            keys = self._keys(BATCH_KEYS)
            stored, removed = ClaimChange(device_stored=keys), ClaimChange(device_removed=keys, host_stored=keys)
            found.append((name, encode_batch(ClaimBatch(1, sequence, stored))))
            found.append((name, encode_batch(ClaimBatch(1, sequence + 1, removed))))
        return found

    def _keys(self, number: int) -> NDArray[np.uint64]:
        return self._random.integers(1, 2**64, number, dtype=np.uint64)


def measure_all(
    entries: int, workers: int, seed: int, reports: Reports, *, sweep: bool, sizes: Sizes = SIZES
) -> IndexBench:
    """With `sweep`, also a tenth and a hundredth of the entries, and a tenth on pools up to 4 times as large."""
    began_s, foreign_s = monotonic_s(), foreign_cpu_s()
    by_entries, by_workers = [], []
    if sweep:
        smaller = [size for size in (entries // 100, entries // 10) if size >= sizes.least_entries]
        by_entries = [_reported(size, workers, seed, reports, sizes) for size in smaller]
        pools = (workers, 2 * workers, 4 * workers) if smaller else ()
        by_workers = [_reported(smaller[-1], pool, seed, reports, sizes) for pool in pools]
    figures = _reported(entries, workers, seed, reports, sizes)
    foreign = (foreign_cpu_s() - foreign_s) / (monotonic_s() - began_s)
    if by_entries:
        by_entries.append(figures)
    return IndexBench(figures, tuple(by_entries), tuple(by_workers), round(foreign, 2))


def _reported(entries: int, workers: int, seed: int, reports: Reports, sizes: Sizes) -> IndexFigures:
    reports.phase(f"{entries:,} on {workers}")
    reports.total(entries)
    return measure(entries, workers, seed, reports.done, sizes)


def measure(
    entries: int,
    workers: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda more: None,
    sizes: Sizes = SIZES,
) -> IndexFigures:
    """progress: hears of so many more entries."""
    world = IndexWorld(entries, workers, seed, sizes)
    process = psutil.Process()
    before = process.memory_info().rss
    world.fill(entries, progress)
    grown = process.memory_info().rss - before
    filled = world.index.entries
    decisions, accounts = _timed((world.ask, world.decide, world.account), sizes.decisions)[1:]
    (hashing,) = _timed((world.hash,), sizes.decisions // 4)
    world.prepare_lookups()
    (lookups,) = _timed((world.look_up,), sizes.decisions // 4)
    return IndexFigures(
        entries=filled,
        workers=workers,
        placement_p50_us=_quantile(decisions, 0.5),
        placement_p99_us=_quantile(decisions, 0.99),
        accounting_p50_us=_quantile(accounts, 0.5),
        hashing_p50_us=_quantile(hashing, 0.5),
        lookup_p50_us=_quantile(lookups, 0.5),
        events_per_s=_events_per_s(world),
        bytes_per_entry=grown / filled,
    )


def _events_per_s(world: IndexWorld) -> float:
    """Claims of batches a second, from the bytes that travel to the index."""
    batches = world.batches()
    random.Random(0).shuffle(batches)
    events = 0
    began = time.perf_counter()
    for name, data in batches:
        change = decode_batch(data).change
        world.index.apply(name, change)
        events += len(change)
    return events / (time.perf_counter() - began)


def _timed(steps: Sequence[Callable[[], None]], times: int) -> list[list[float]]:
    """By step, microseconds of each call, in order of size; the first tenth is warm-up and not counted."""
    taken: list[list[float]] = [[] for _ in steps]
    for number in range(times + times // 10):
        for step, work in enumerate(steps):
            began = time.perf_counter()
            work()
            if number >= times // 10:
                taken[step].append((time.perf_counter() - began) * 1e6)
    return [sorted(each) for each in taken]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _registration(name: str) -> wire.WorkerRegistration:
    return wire.WorkerRegistration(
        worker_id=name,
        generation=1,
        pool=wire.POOL_PREFILL,
        state=wire.WORKER_STATE_READY,
        block_size_tokens=_BLOCK_TOKENS,
        max_running_requests=256,
        load=wire.WorkerLoad(free_blocks=60_000, total_blocks=60_000),
    )
