"""A client of the in-memory Redis, as the production code uses `redis.asyncio`."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import redis.asyncio as redis

from fault_sim.local_redis.scripts import SCRIPTS
from fault_sim.local_redis.store import Store, encoded
from fault_sim.network import Network

HOST = "redis"


class LocalRedis:
    """In place of `redis.asyncio.Redis`: a client on one host. A call takes the time of the way there and back."""

    def __init__(self, store: Store, network: Network, host: str, timeout_s: float) -> None:
        self.store = store
        self._link = network.link(host, HOST)
        self._timeout_s = timeout_s
        self.is_dead = False

    def __getattr__(self, command: str) -> Callable[..., Any]:
        method = getattr(self.store, command)

        async def call(*args: Any, **options: Any) -> Any:
            await self._travel()
            return method(*args, **options)

        return call

    async def eval(self, script: str, keys: int, *args: Any) -> Any:
        await self._travel()
        return _evaluated(self.store, script, keys, *args)

    def register_script(self, script: str) -> Callable[..., Any]:
        async def call(*, keys: Sequence[str], args: Sequence[Any]) -> Any:
            return await self.eval(script, len(keys), *keys, *args)

        return call

    def pipeline(self, *, transaction: bool) -> "_Pipeline":
        return _Pipeline(self.store, self._travel)

    async def aclose(self) -> None:
        self.is_dead = True

    async def _travel(self) -> None:
        """There and back. Raises what a client raises when the server does not answer."""
        waited_s = self._link.delay_s() * 2
        await asyncio.sleep(min(waited_s, self._timeout_s))
        if self.is_dead or self.store.is_down:
            raise redis.ConnectionError("Error connecting to redis: connection refused")
        if waited_s > self._timeout_s:
            raise redis.TimeoutError("Timeout reading from redis")
        if self._link.is_cut:
            await asyncio.sleep(self._timeout_s)
            raise redis.TimeoutError("Timeout reading from redis")


def _evaluated(store: Store, script: str, keys: int, *args: Any) -> Any:
    return SCRIPTS[script](store, list(args[:keys]), [encoded(arg) for arg in args[keys:]])


class _Pipeline:
    """Commands that are sent together."""

    def __init__(self, store: Store, travel: Callable[[], Any]) -> None:
        self.store = store
        self._travel = travel
        self._commands: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, command: str) -> Callable[..., None]:
        method = getattr(self.store, command)
        return lambda *args, **options: self._commands.append((method, args, options))

    def eval(self, *args: Any) -> None:
        self._commands.append((partial(_evaluated, self.store), args, {}))

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
