"""The data of one Redis server: commands are methods by their names in `redis-py`, and do what the server does."""

from collections.abc import Callable, Sequence, Set
from copy import deepcopy
from typing import Any, TypeVar

import redis

from cluster_core.clock import unix_ms

# Generation and number of a stream's entry.
EntryId = tuple[int, int]
Script = Callable[["Store", Sequence[str], Sequence[bytes]], Any]
Value = TypeVar("Value")


def encoded(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return str(value).encode()


def entry_id(name: bytes | str) -> EntryId:
    text = name.decode() if isinstance(name, bytes) else name
    first, _, second = text.partition("-")
    return int(first), int(second or 0)


def entry_name(entry: EntryId) -> bytes:
    return f"{entry[0]}-{entry[1]}".encode()


class Stream:
    """last: id of the entry that was added last, whether it is still there or not."""

    def __init__(self) -> None:
        self.entries: list[tuple[EntryId, dict[bytes, bytes]]] = []
        self.last: EntryId = (0, 0)


# A set, in the order in which its members came.
_Members = dict[bytes, None]


class Store:
    """A value is bytes, a set or a stream. A key that was not set, or has expired, is not there."""

    def __init__(self) -> None:
        self.is_down = False
        self._values: dict[str, Any] = {}
        self._expires_ms: dict[str, int] = {}

    # Any key.

    def delete(self, *keys: str) -> int:
        found = self.exists(*keys)
        for key in keys:
            self._drop(key)
        return found

    def exists(self, *keys: str) -> int:
        return sum(self._live(key, object) is not None for key in keys)

    def pexpire(self, key: str, ms: int) -> int:
        if not self.exists(key):
            return 0
        self._expires_ms[key] = unix_ms() + ms
        return 1

    def flushall(self) -> bool:
        self._values.clear()
        self._expires_ms.clear()
        return True

    # Values.

    def get(self, key: str) -> bytes | None:
        return self._live(key, bytes)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def set(self, key: str, value: Any, *, px: int | None = None, ex: int | None = None) -> bool:
        self._values[key] = encoded(value)
        self._expires_ms.pop(key, None)
        if px is not None or ex is not None:
            self.pexpire(key, px if px is not None else 1000 * (ex or 0))
        return True

    # Hashes.

    def hset(self, key: str, field: Any, value: Any) -> int:
        fields: dict[bytes, bytes] = self._made(key, dict)
        name = encoded(field)
        is_new = name not in fields
        fields[name] = encoded(value)
        return int(is_new)

    def hsetnx(self, key: str, field: Any, value: Any) -> int:
        fields: dict[bytes, bytes] = self._made(key, dict)
        return self.hset(key, field, value) if encoded(field) not in fields else 0

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        return dict(self._live(key, dict) or {})

    def hdel(self, key: str, *names: Any) -> int:
        fields: dict[bytes, bytes] = self._live(key, dict) or {}
        return sum(fields.pop(encoded(name), None) is not None for name in names)

    # Sets.

    def sadd(self, key: str, *added: Any) -> int:
        members: _Members = self._made(key, dict)
        before = len(members)
        members.update((encoded(member), None) for member in added)
        return len(members) - before

    def smembers(self, key: str) -> Set[bytes]:
        members: _Members = self._live(key, dict) or {}
        return members.keys()

    # Streams.

    def xadd(
        self, key: str, fields: dict[Any, Any], id: str = "*", maxlen: int | None = None, approximate: bool = True
    ) -> bytes:
        stream = self._made(key, Stream)
        now = unix_ms()
        name = entry_id(id) if id != "*" else max((int(now), 0), (stream.last[0], stream.last[1] + 1))
        if name <= stream.last:
            raise redis.ResponseError("The ID specified in XADD is equal or smaller than the target stream top item")
        stream.entries.append((name, {encoded(field): encoded(value) for field, value in fields.items()}))
        stream.last = name
        if maxlen is not None:
            self.xtrim(key, maxlen=maxlen)
        return entry_name(name)

    def xrange(
        self, key: str, min: str = "-", max: str = "+", count: int | None = None
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """min, max: `(` before an id leaves that entry out."""
        stream = self.stream(key)
        low = entry_id(min.lstrip("(")) if min != "-" else (0, 0)
        high = entry_id(max.lstrip("(")) if max != "+" else (1 << 64, 1 << 64)
        found = [
            (entry_name(name), fields)
            for name, fields in (stream.entries if stream is not None else ())
            if low <= name <= high and not (min[0] == "(" and name == low) and not (max[0] == "(" and name == high)
        ]
        return found[:count]

    def xdel(self, key: str, *ids: bytes | str) -> int:
        stream = self.stream(key)
        if stream is None:
            return 0
        gone = {entry_id(name) for name in ids}
        before = len(stream.entries)
        stream.entries = [entry for entry in stream.entries if entry[0] not in gone]
        return before - len(stream.entries)

    def xtrim(self, key: str, maxlen: int | None = None, minid: str | None = None, approximate: bool = True) -> int:
        """Never leaves more than it has to: what `approximate` allows a server to do."""
        stream = self.stream(key)
        if stream is None:
            return 0
        before, least = len(stream.entries), entry_id(minid) if minid is not None else (0, 0)
        kept = [entry for entry in stream.entries if entry[0] >= least]
        stream.entries = kept if maxlen is None else kept[max(0, len(kept) - maxlen) :]
        return before - len(stream.entries)

    def xinfo_stream(self, key: str) -> dict[str, Any]:
        """What of it this project reads."""
        stream = self.stream(key)
        if stream is None:
            raise redis.ResponseError("no such key")
        return {"length": len(stream.entries), "last-generated-id": entry_name(stream.last)}

    # Behind the commands.

    def stream(self, key: str) -> Stream | None:
        return self._live(key, Stream)

    def last_id(self, key: str) -> EntryId | None:
        stream = self.stream(key)
        return stream.last if stream is not None else None

    def replica(self) -> "Store":
        """What a replica has now; nothing that comes later reaches it."""
        return deepcopy(self)

    def fail_over(self, replica: "Store") -> None:
        """The replica is the server from now on."""
        self._values, self._expires_ms = replica._values, replica._expires_ms

    def _live(self, key: str, kind: type[Value]) -> Value | None:
        expires_ms = self._expires_ms.get(key)
        if expires_ms is not None and expires_ms <= unix_ms():
            self._drop(key)
        value = self._values.get(key)
        if value is not None and not isinstance(value, kind):
            raise redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _made(self, key: str, kind: type[Value]) -> Value:
        """An empty one where there was none."""
        value = self._live(key, kind)
        if value is None:
            value = self._values[key] = kind()
        return value

    def _drop(self, key: str) -> None:
        self._values.pop(key, None)
        self._expires_ms.pop(key, None)
