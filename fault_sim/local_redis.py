"""Redis in memory: what of it the registry and the prefix index use, with expiry on the simulation's clock.

One `Store` is the server; each client is made for a host and reaches it over that host's link. A server that is down
refuses connections; a link that is cut lets calls run into their timeout. Scripts are known by their text and written
again in `redis_scripts`; the contract tests run the same production code against this and a real Redis.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import redis.asyncio as redis

from cluster_core.clock import unix_ms
from fault_sim.network import Network

HOST = "redis"
# Generation and number of a stream's entry.
EntryId = tuple[int, int]
Script = Callable[["Store", Sequence[str], Sequence[bytes]], Any]


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


class Store:
    """The data of one server. Commands are methods by their names in lower case."""

    def __init__(self) -> None:
        self.is_down = False
        self._values: dict[str, Any] = {}
        self._expires_ms: dict[str, int] = {}

    def empty(self) -> None:
        self._values.clear()
        self._expires_ms.clear()

    def get(self, key: str) -> bytes | None:
        value: bytes | None = self._live(key)
        return value

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def set(self, key: str, value: Any, *, px: int | None = None, ex: int | None = None) -> bool:
        self._values[key] = encoded(value)
        self._expires_ms.pop(key, None)
        if px is not None or ex is not None:
            self.pexpire(key, px if px is not None else 1000 * (ex or 0))
        return True

    def delete(self, *keys: str) -> int:
        found = sum(self.exists(key) for key in keys)
        for key in keys:
            self._values.pop(key, None)
        return found

    def exists(self, key: str) -> int:
        return int(self._live(key) is not None)

    def pexpire(self, key: str, ms: int) -> int:
        if self._live(key) is None:
            return 0
        self._expires_ms[key] = unix_ms() + ms
        return 1

    def sadd(self, key: str, member: Any) -> int:
        members: dict[bytes, None] = self._values.setdefault(key, {})
        is_new = encoded(member) not in members
        members[encoded(member)] = None
        return int(is_new)

    def smembers(self, key: str) -> Set[bytes]:
        members: dict[bytes, None] = self._live(key) or {}
        return members.keys()

    def xadd(
        self, key: str, fields: dict[Any, Any], id: str = "*", maxlen: int | None = None, approximate: bool = True
    ) -> bytes:
        stream: Stream = self._live(key) or self._values.setdefault(key, Stream())
        now = unix_ms()
        name = entry_id(id) if id != "*" else max((int(now), 0), (stream.last[0], stream.last[1] + 1))
        if name <= stream.last:
            raise redis.ResponseError("The ID specified in XADD is equal or smaller than the target stream top item")
        stream.entries.append((name, {encoded(field): encoded(value) for field, value in fields.items()}))
        stream.last = name
        if maxlen is not None:
            del stream.entries[: max(0, len(stream.entries) - maxlen)]
        return entry_name(name)

    def xrange(
        self, key: str, min: str = "-", max: str = "+", count: int | None = None
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        stream: Stream | None = self._live(key)
        low = entry_id(min) if min != "-" else (0, 0)
        high = entry_id(max) if max != "+" else (1 << 64, 1 << 64)
        found = [entry for entry in (stream.entries if stream else ()) if low <= entry[0] <= high]
        return [(entry_name(name), fields) for name, fields in found[:count]]

    def xtrim(self, key: str, minid: EntryId) -> None:
        """Entries below that id go."""
        stream: Stream | None = self._live(key)
        if stream is not None:
            stream.entries = [entry for entry in stream.entries if entry[0] >= minid]

    def last_id(self, key: str) -> EntryId | None:
        stream: Stream | None = self._live(key)
        return stream.last if stream is not None else None

    def _live(self, key: str) -> Any:
        expires_ms = self._expires_ms.get(key)
        if expires_ms is not None and expires_ms <= unix_ms():
            del self._expires_ms[key]
            self._values.pop(key, None)
        return self._values.get(key)


class LocalRedis:
    """In place of `redis.asyncio.Redis`."""

    def __init__(self, store: Store, network: Network, host: str, timeout_s: float, scripts: dict[str, Script]) -> None:
        self._store = store
        self._link = network.link(host, HOST)
        self._timeout_s = timeout_s
        self._scripts = scripts
        self.is_dead = False

    def __getattr__(self, command: str) -> Callable[..., Any]:
        method = getattr(self._store, command)

        async def call(*args: Any, **options: Any) -> Any:
            await self._travel()
            return method(*args, **options)

        return call

    async def eval(self, script: str, keys: int, *args: Any) -> Any:
        await self._travel()
        return self._scripts[script](self._store, list(args[:keys]), [encoded(arg) for arg in args[keys:]])

    def register_script(self, script: str) -> Callable[..., Any]:
        async def call(*, keys: Sequence[str], args: Sequence[Any]) -> Any:
            return await self.eval(script, len(keys), *keys, *args)

        return call

    def pipeline(self, *, transaction: bool) -> "_Pipeline":
        return _Pipeline(self._store, self._travel)

    async def aclose(self) -> None:
        self.is_dead = True

    async def _travel(self) -> None:
        """There and back. Raises what a client raises when the server does not answer."""
        waited_s = self._link.delay_s() * 2
        await asyncio.sleep(min(waited_s, self._timeout_s))
        if self.is_dead or self._store.is_down:
            raise redis.ConnectionError("Error connecting to redis: connection refused")
        if waited_s > self._timeout_s:
            raise redis.TimeoutError("Timeout reading from redis")
        if self._link.is_cut:
            await asyncio.sleep(self._timeout_s)
            raise redis.TimeoutError("Timeout reading from redis")


class _Pipeline:
    """Commands that are sent together."""

    def __init__(self, store: Store, travel: Callable[[], Any]) -> None:
        self._store = store
        self._travel = travel
        self._commands: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, command: str) -> Callable[..., None]:
        method = getattr(self._store, command)
        return lambda *args, **options: self._commands.append((method, args, options))

    def __len__(self) -> int:
        return len(self._commands)

    async def __aenter__(self) -> "_Pipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._commands.clear()

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        if not self._commands:
            return []
        await self._travel()
        commands, self._commands = self._commands, []
        return list(self._answers(commands, raise_on_error=raise_on_error))

    def _answers(self, commands: Sequence[Any], *, raise_on_error: bool) -> Iterator[Any]:
        for method, args, options in commands:
            try:
                yield method(*args, **options)
            except redis.RedisError as error:
                if raise_on_error:
                    raise
                yield error
