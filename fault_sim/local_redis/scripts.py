"""The Lua scripts of the registry and the prefix index, by their text, as functions of a `Store`."""

import math
import re
from collections.abc import Sequence

from cluster_core.clock import unix_ms
from cluster_wire import redis_memory
from control_plane.fleet import fencing, load_sharing
from control_plane.intake import shared_rates
from control_plane.placement import replicator
from control_plane.prefix_index import access_log, redis_index
from control_plane.prefix_index.hotness_snapshot import NAME_BYTES
from fault_sim.local_redis.store import EntryId, Script, Store, entry_id
from worker_runtime import claim_scripts, registration


def _with_time(answer: int) -> tuple[int, int, int]:
    """Seconds and microseconds of Redis's clock stand after it."""
    return answer, unix_ms() // 1000, unix_ms() % 1000 * 1000


def _next_generation(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> tuple[int, int, int]:
    generation = max(int(store.get(keys[0]) or 0) + 1, int(unix_ms()))
    store.set(keys[0], generation, px=int(args[0]))
    return _with_time(generation)


def _publish(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> tuple[int, int, int]:
    record, holder, workers, counter = keys
    name, generation, value, lease_ms, kept_ms = args
    if int(store.get(holder) or 0) > int(generation):
        return _with_time(0)
    store.set(record, value, px=int(lease_ms))
    store.set(holder, generation, px=int(lease_ms))
    store.sadd(workers, name)
    if int(store.get(counter) or 0) < int(generation):
        store.set(counter, generation)
    store.pexpire(workers, int(kept_ms))
    store.pexpire(counter, int(kept_ms))
    return _with_time(1)


def _remove(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> int:
    return store.delete(*keys) if store.get(keys[1]) == args[0] else 0


def _is_superseded(last: EntryId | None, generation: bytes) -> bool:
    return last is not None and last[0] > int(generation)


def _write(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> bytes:
    generation, before, keep_ms = args[:3]
    entries = [(entry_id(args[at]), args[at + 1]) for at in range(3, len(args), 2)]
    last = store.last_id(keys[0])
    if _is_superseded(last, generation):
        return b"superseded"
    known = [entry_id(before), *(name for name, _ in entries)]
    if last not in known:
        return b"lost"
    for name, batch in entries[known.index(last) :]:
        store.xadd(keys[0], {"b": batch}, id=f"{name[0]}-{name[1]}")
    store.pexpire(keys[0], int(keep_ms))
    return b"ok"


def _snapshot(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> bytes:
    generation, until, keep_ms, snapshot, oldest = args
    last = store.last_id(keys[0])
    if _is_superseded(last, generation):
        return b"superseded"
    if last == entry_id(until):
        store.xtrim(keys[0], minid=oldest.decode(), approximate=False)
    else:
        store.xadd(keys[0], {"b": b""}, id=until.decode(), maxlen=0)
    store.pexpire(keys[0], int(keep_ms))
    store.set(keys[1], snapshot, px=int(keep_ms))
    store.delete(keys[2])
    return b"ok"


def _check(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> bytes:
    generation, written, keep_ms = args
    last = store.last_id(keys[0])
    if _is_superseded(last, generation):
        return b"superseded"
    if last != entry_id(written) or not store.exists(keys[1]):
        return b"lost"
    store.pexpire(keys[0], int(keep_ms))
    store.pexpire(keys[1], int(keep_ms))
    return b"resync" if store.exists(keys[2]) else b"ok"


def _time(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> tuple[int, int]:
    return _with_time(0)[1:]


def _write_hotness(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> int:
    base, snapshot, oldest, kept_ms = args
    if (store.get(keys[1]) or b"")[:NAME_BYTES] != base:
        return 0
    store.set(keys[1], snapshot, px=int(kept_ms))
    store.xtrim(keys[0], minid=oldest.decode(), approximate=False)
    return 1


def _ask(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> int:
    store.set(keys[0], 1, ex=int(args[0]))
    return 1


def _hold(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> int:
    if (store.get(keys[0]) or args[0]) != args[0]:
        return 0
    store.set(keys[0], args[0], px=int(args[1]))
    return 1


# What a bucket has, and when that was.
_BUCKET = re.compile(rb"(-?\d+\.\d+) (\d+\.\d+)")


def _spend(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> list[bytes]:
    now_s, (most_debt_s, kept_ms, *numbers) = unix_ms() / 1000, map(float, args)
    levels, told = [], zip(*(numbers[at::4] for at in range(4)), strict=True)
    for key, told_key, (rate, burst, spent, number) in zip(keys[::2], keys[1::2], told, strict=True):
        level, kept = burst, _BUCKET.fullmatch(store.get(key) or b"")
        if kept:
            had, at_s = map(float, kept.groups())
            level = min(burst, had + max(0.0, now_s - at_s) * rate)
        if spent:
            last = int(store.get(told_key) or 0)
            spent = spent if last < number else 0.0
            store.set(told_key, max(last, int(number)), px=int(kept_ms))
        level = min(burst, max(level - spent, -most_debt_s * rate))
        store.set(key, f"{level:.6f} {now_s:.6f}", px=math.ceil((burst - level) / rate * 1000) + 1)
        levels.append(f"{level:.6f}".encode())
    return levels


def _fence(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> int:
    record, holder = keys
    first_generation, kept_s = args
    if int(store.get(holder) or 0) >= int(first_generation):
        return 0
    store.delete(record)
    store.set(holder, first_generation, ex=int(kept_s))
    return 1


def _tell(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> int:
    router, told, kept_ms = args
    store.hset(keys[0], router, told)
    return store.pexpire(keys[0], int(kept_ms))


def _memory(store: Store, keys: Sequence[str], args: Sequence[bytes]) -> bytes:
    """It has no limit."""
    return b""


SCRIPTS: dict[str, Script] = {
    registration.NEXT_GENERATION: _next_generation,
    registration.PUBLISH: _publish,
    registration.REMOVE: _remove,
    claim_scripts.WRITE: _write,
    claim_scripts.SNAPSHOT: _snapshot,
    claim_scripts.CHECK: _check,
    access_log.SAY_TIME: _time,
    access_log.WRITE_SNAPSHOT: _write_hotness,
    redis_index.ASK: _ask,
    replicator.HOLD: _hold,
    shared_rates.SPEND: _spend,
    fencing.FENCE: _fence,
    load_sharing.TELL: _tell,
    redis_memory.SAY_MEMORY: _memory,
}
