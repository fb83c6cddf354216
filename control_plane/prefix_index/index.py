"""Which worker holds which prefix, in which tier, and how hot each prefix is: what one router knows of it, in memory.

Presence is what workers claim (`claims`) and what this router predicts from its own placements. Hotness is
counted from requests of the whole cluster: a decayed count that halves every `half_life_s`, kept as
log2(sum of 2^(t / half life)), so that time alone changes no entry and the coldest stays the coldest.

No claim is an entry of its own: a chunk's holders are one number (`holder_sets`), its place is in a table of fixed size
(`table`). Everything works on whole prompts or batches at once.

Source of the decay: Cormode et al., "Forward decay", ICDE 2009.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from control_plane.model.memory_use import MemoryUse
from control_plane.prefix_index.holder_sets import NOBODY, UNKNOWN, HolderSets, Masks, Plane, slots_in
from control_plane.prefix_index.hot_prefix import HotPrefix
from control_plane.prefix_index.index_prompts import IndexPrompts
from control_plane.prefix_index.predictions import Predictions
from control_plane.prefix_index.table import NOWHERE, Places, PrefixTable
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys

Counts = NDArray[np.int64]

# What was stored and not yet asked for counts as so much of a request.
_NOT_ACCESSED = 2.0**-6
# float32 keeps heat to one part in a thousand for so many half-lives after the reference.
_MOST_HALF_LIVES = 8192
# Along a prompt, heat that falls by so much of a doubling ends a prefix.
_STEP = 0.2
_LEAST_PROMISING = 32
_COLDEST = np.float32(-1e30)
_SPARE_SETS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """How much of one prompt each worker holds, in chunks from its beginning; arrays over the slots of the index."""

    chunks: int
    # On the device.
    device: Counts
    # There, or predicted to be.
    warm: Counts
    # Warm, or continued in host memory.
    held: Counts


@dataclass(slots=True)
class _Holder:
    """A worker that is in the index."""

    generation: int
    slot: int


class PrefixIndex:
    """See the module. max_entries: chunks remembered; a place takes 16 bytes. Times of `accessed` are Redis's, in s.

    start_s: now, by a clock of which `clock_set` says how wrong it was: as hot as that is what workers claim before
    anything is asked for.
    """

    def __init__(self, max_entries: int, half_life_s: float, start_s: float = 0.0) -> None:
        self._table = PrefixTable(max_entries)
        self._sets = HolderSets()
        self._half_life_s = half_life_s
        self._holders: dict[str, _Holder] = {}
        # How often a worker has come or gone: while it stays, `slot` answers the same.
        self.holder_changes = 0
        self._names: list[str | None] = []
        self._reference_s = start_s
        self._latest_s = start_s
        self._predictions = Predictions()
        self._prompts = IndexPrompts(max_entries)
        self._next_compaction = _SPARE_SETS

    # Which workers are there.

    def join(self, worker_id: str, generation: int) -> None:
        """A worker may hold something from now on. A new generation holds nothing of what the one before held."""
        known = self._holders.get(worker_id)
        if known is not None:
            if known.generation == generation:
                return
            self.leave(worker_id)
        slot = self._names.index(None) if None in self._names else len(self._names)
        if slot == len(self._names):
            self._names.append(None)
        self._names[slot] = worker_id
        self.holder_changes += 1
        self._holders[worker_id] = _Holder(generation, slot)

    def leave(self, worker_id: str) -> None:
        """All that the worker held is void at once; harmless for one that is not there."""
        holder = self._holders.pop(worker_id, None)
        if holder is not None:
            self._forget(holder.slot)
            self._names[holder.slot] = None
            self.holder_changes += 1

    def slot(self, worker_id: str, generation: int) -> int:
        """The worker's place in the arrays of `Matches`; -1 where it, or this start of it, is not in the index."""
        holder = self._holders.get(worker_id)
        return holder.slot if holder is not None and holder.generation == generation else -1

    def generation(self, worker_id: str) -> int:
        """Whose claims these are; 0 where the worker is not in the index."""
        holder = self._holders.get(worker_id)
        return holder.generation if holder is not None else 0

    @property
    def workers(self) -> list[str]:
        return sorted(self._holders)

    # What they hold.

    def apply(self, worker_id: str, change: ClaimChange) -> None:
        """Takes a batch in. What a worker claims that is not in the index is nobody's."""
        holder = self._holders.get(worker_id)
        if holder is None:
            return
        self._claim(change.device_removed, Plane.DEVICE, holder.slot, present=False)
        self._claim(change.host_removed, Plane.HOST, holder.slot, present=False)
        self._claim(change.device_stored, Plane.DEVICE, holder.slot, present=True)
        self._claim(change.host_stored, Plane.HOST, holder.slot, present=True)

    def replace(self, worker_id: str, device: Keys, host: Keys) -> None:
        """These are all the worker's claims."""
        holder = self._holders.get(worker_id)
        if holder is None:
            return
        self._forget(holder.slot)
        self._claim(device, Plane.DEVICE, holder.slot, present=True)
        self._claim(host, Plane.HOST, holder.slot, present=True)

    def claims(self, worker_id: str) -> tuple[Keys, Keys]:
        """What the worker holds as far as the index remembers, on the device and in host memory. O(capacity)."""
        holder = self._holders.get(worker_id)
        slot = holder.slot if holder is not None else -1
        return self._claims(Plane.DEVICE, slot), self._claims(Plane.HOST, slot)

    def predict(self, worker_id: str, keys: Keys, until_s: float) -> None:
        """A request with this prompt was sent to the worker: it will hold it. until_s: on the clock of `expire`."""
        holder = self._holders.get(worker_id)
        if holder is None or not len(keys):
            return
        self._predictions.add(holder.slot, keys, until_s)
        self._claim(keys, Plane.PREDICTED, holder.slot, present=True)

    def expire(self, now_s: float) -> None:
        """Withdraws predictions that have ended: the worker has claimed the blocks, or never will."""
        for slot, over in self._predictions.expire(now_s):
            self._claim(over, Plane.PREDICTED, slot, present=False)

    def lookup(self, keys: Keys, now_s: float = -math.inf) -> Matches:
        """Who holds how much of a prompt, given by its chunks' keys. Changes nothing.

        now_s: what `expire` would withdraw at that time is not believed, whether it has been withdrawn or not.
        """
        slots = len(self._names)
        device, warm, held = (np.zeros(slots, dtype=np.int64) for _ in range(3))
        if len(keys) and slots:
            places = self._table.find(keys)
            ended = self._predictions.ended(int(keys[0]), now_s)
            holders, starts = self._stretches_without(ended, keys, places) if ended else self._stretches(places)
            _measure(holders, starts, len(keys), (device, warm, held))
        return Matches(len(keys), device, warm, held)

    # How hot it is.

    def accessed(self, keys: Keys, at_s: float, weight: float = 1.0) -> None:
        """A request has asked for this prompt."""
        if not len(keys):
            return
        self._follow_time(at_s)
        worth = self._score(at_s, weight)
        places = self._table.find_or_add(keys, -math.inf, worth)
        places = places[places != NOWHERE]
        self._table.heat[places] = np.logaddexp2(self._table.heat[places], np.float32(worth))
        self._prompts.add(keys)

    def clock_set(self, by_s: float) -> None:
        """The clock of these times goes so much ahead of what it went by: what was hot stays as hot as it was."""
        self._reference_s += by_s
        self._latest_s += by_s

    def hotness(self, keys: Keys, now_s: float) -> NDArray[np.float64]:
        """Requests a second that asked for each chunk, decayed; 0 for what is not remembered."""
        return self._rates(self._heat(keys), now_s)

    def hottest(self, at_most: int, now_s: float) -> list[HotPrefix]:
        """Prefixes of its prompts, hottest first. Of a prompt each stretch counts that is as hot as its end."""
        # By key: where it ends in which prompt.
        found: dict[int, tuple[int, Keys]] = {}
        for keys in self._promising(max(at_most, _LEAST_PROMISING)):
            heat = np.maximum(self._heat(keys), _COLDEST)
            for end in [*np.flatnonzero(heat[:-1] - heat[1:] > _STEP).tolist(), len(keys) - 1]:
                found.setdefault(int(keys[end]), (end, keys))
        names = np.array(list(found), dtype=np.uint64)
        rates = self.hotness(names, now_s) if len(names) else np.empty(0)
        order = np.argsort(-rates, kind="stable")[:at_most]
        told = names[order]
        return [self._described(*found[int(key)], rate, told) for key, rate in zip(told, rates[order], strict=True)]

    def _promising(self, at_most: int) -> list[Keys]:
        """Of its prompts those that are hottest where they begin, in the middle, or where they end.

        Looking along each of thousands would hold up the router.
        """
        prompts = self._prompts.all()
        if len(prompts) <= at_most:
            return prompts
        chosen: set[int] = set()
        for share in (0.0, 0.5, 1.0):
            names = np.array([keys[int(share * (len(keys) - 1))] for keys in prompts], dtype=np.uint64)
            chosen.update(np.argsort(-self._heat(names), kind="stable")[:at_most].tolist())
        return [prompts[each] for each in sorted(chosen)]

    def restore_hotness(self, keys: Keys, counts: NDArray[np.float32], at_s: float) -> None:
        """Takes in log2 of decayed counts as of that time; the greater count of the two is believed."""
        if not len(keys):
            return
        self._follow_time(at_s)
        places = self._table.find_or_add(keys, self._score(at_s, _NOT_ACCESSED), self._score(at_s, 1.0))
        known = places != NOWHERE
        places = places[known]
        restored = counts[known] + np.float32(self._score(at_s, 1.0))
        self._table.heat[places] = np.maximum(self._table.heat[places], restored)

    # Size.

    @property
    def entries(self) -> int:
        return self._table.entries

    @property
    def capacity(self) -> int:
        return self._table.capacity

    @property
    def dropped(self) -> int:
        """Chunks that were forgotten because hotter ones needed their places."""
        return self._table.dropped

    @property
    def bytes(self) -> int:
        return self._table.bytes

    def memory(self) -> MemoryUse:
        """What is kept beside the table, of prompts that were asked for."""
        return self._prompts.memory()

    def check_invariants(self) -> None:
        self._prompts.check_invariants()
        self._predictions.check_invariants()
        used = self._table.used()
        assert len(used) == self._table.entries, f"{len(used)} entries, {self._table.entries} counted"
        assert len(np.unique(self._table.keys[used])) == len(used), "a key stands in two places"
        assert int(self._table.sets.max(initial=0)) < len(self._sets), "an entry refers to a set that is not there"
        slots = sum(1 << holder.slot for holder in self._holders.values())
        for set_id in range(len(self._sets)):
            for mask in self._sets.masks(set_id):
                assert not mask & ~slots, "a worker that is gone holds something"

    def _claim(self, keys: Keys, plane: Plane, slot: int, *, present: bool) -> None:
        if not len(keys):
            return
        table = self._table
        if present:
            # Somebody has just asked for it, as a rule: it may take the place of what was asked for once, long ago.
            heat, worth = self._score(self._latest_s, _NOT_ACCESSED), self._score(self._latest_s, 1.0)
            places = table.find_or_add(keys, heat, worth)
        else:
            places = table.find(keys)
        places = places[places != NOWHERE]
        if len(places):
            table.sets[places] = self._sets.changed_all(table.sets[places], plane, slot, present)
        if len(self._sets) > self._next_compaction:
            self._compact()

    def _holders_along(self, places: Places) -> NDArray[np.uint32]:
        """The set of each chunk of a prompt.

        A chunk of which nothing is known, before one that is held, has had to give way: it is where that one is, as
        engines keep no chunk without those before it. That a chunk has left a worker is known, and another matter.
        """
        found = np.where(places == NOWHERE, np.uint32(UNKNOWN), self._table.sets[places])
        known = np.flatnonzero(found != UNKNOWN)
        sets = np.full(len(places), NOBODY, dtype=np.uint32)
        if len(known):
            until = known[-1] + 1
            if len(known) == until:
                sets[:until] = found[:until]
            else:
                sets[:until] = found[known][np.searchsorted(known, np.arange(until))]
        return sets

    def _stretches(self, places: Places) -> tuple[list[Masks], list[int]]:
        """Of a prompt with the same holders: who they are, and where each stretch begins."""
        sets = self._holders_along(places)
        starts = np.concatenate(([0], np.flatnonzero(sets[1:] != sets[:-1]) + 1))
        return [self._sets.masks(each) for each in sets[starts].tolist()], starts.tolist()

    def _stretches_without(
        self, ended: Mapping[int, Keys], keys: Keys, places: Places
    ) -> tuple[list[Masks], list[int]]:
        """`_stretches` as it will be once these predictions, by slot, are withdrawn. Chunk by chunk, as it is rare."""
        withdrawn: dict[int, int] = {}
        for slot, over in ended.items():
            for chunk in np.flatnonzero(np.isin(keys, over) & (places != NOWHERE)).tolist():
                withdrawn[chunk] = withdrawn.get(chunk, 0) | 1 << slot
        sets = np.where(places == NOWHERE, np.uint32(UNKNOWN), self._table.sets[places]).tolist()
        holders: list[Masks] = [(0, 0, 0)] * len(sets)
        following = holders[-1]
        for chunk in reversed(range(len(sets))):
            # What is withdrawn is known to have left; what else is not known is where the next chunk is.
            if sets[chunk] != UNKNOWN or chunk in withdrawn:
                device, host, predicted = self._sets.masks(sets[chunk])
                following = (device, host, predicted & ~withdrawn.get(chunk, 0))
            holders[chunk] = following
        return holders, list(range(len(holders)))

    def _compact(self) -> None:
        used = np.zeros(len(self._sets), dtype=np.bool_)
        used[self._table.sets] = True
        self._table.sets[:] = self._sets.compacted(used)[self._table.sets]
        self._next_compaction = 2 * len(self._sets) + _SPARE_SETS

    def _forget(self, slot: int) -> None:
        self._sets.without(slot)
        self._predictions.forget(slot)

    def _claims(self, plane: Plane, slot: int) -> Keys:
        if slot < 0:
            return np.empty(0, dtype=np.uint64)
        keys: Keys = self._table.keys[self._sets.holding(plane, slot)[self._table.sets]]
        return keys

    def _described(self, end: int, keys: Keys, rate: float, told: Keys) -> HotPrefix:
        """Of the prompt with these keys up to `end`. told: the keys of all prefixes that are."""
        place, before = self._table.find(keys[end : end + 1]), np.flatnonzero(np.isin(keys[:end], told))
        device, host, _ = self._sets.masks(int(self._table.sets[place[0]]) if place[0] != NOWHERE else NOBODY)
        parent = int(keys[before[-1]]) if len(before) else None
        return HotPrefix(int(keys[end]), end + 1, float(rate), self._named(device), self._named(host), parent)

    def _named(self, mask: int) -> tuple[str, ...]:
        return tuple(sorted(name for name in (self._names[slot] for slot in slots_in(mask)) if name is not None))

    def _score(self, at_s: float, weight: float) -> float:
        return (at_s - self._reference_s) / self._half_life_s + math.log2(weight)

    def _heat(self, keys: Keys) -> NDArray[np.float32]:
        places = self._table.find(keys)
        return np.where(places == NOWHERE, np.float32(-np.inf), self._table.heat[places])

    def _rates(self, heat: NDArray[np.floating], now_s: float) -> NDArray[np.float64]:
        counts = np.exp2(heat.astype(np.float64) - self._score(now_s, 1.0))
        # No more than what nobody has asked for.
        counts[counts <= _NOT_ACCESSED * (1 + _STEP)] = 0.0
        rates: NDArray[np.float64] = counts * math.log(2) / self._half_life_s
        return rates

    def _follow_time(self, at_s: float) -> None:
        """Moves the reference when heat would lose precision. Rare; O(capacity)."""
        self._latest_s = max(self._latest_s, at_s)
        if at_s - self._reference_s > _MOST_HALF_LIVES * self._half_life_s:
            used: Places = self._table.used()
            self._table.heat[used] -= np.float32((at_s - self._reference_s) / self._half_life_s)
            self._reference_s = at_s


def _measure(holders: list[Masks], starts: list[int], chunks: int, lengths: tuple[Counts, Counts, Counts]) -> None:
    """Walks the stretches of a prompt with the same holders; `lengths`: as the fields of `Matches`."""
    alive: tuple[int, ...] | None = None
    for (device, host, predicted), start in zip(holders, starts, strict=True):
        present = (device, device | predicted, device | predicted | host)
        if alive is None:
            alive = present
            continue
        for length, before, now in zip(lengths, alive, present, strict=True):
            for slot in slots_in(before & ~now):
                length[slot] = start
        alive = tuple(before & now for before, now in zip(alive, present, strict=True))
        if not alive[2]:
            return
    for length, before in zip(lengths, alive or (), strict=False):
        for slot in slots_in(before):
            length[slot] = chunks
