"""Which LoRA adapters an engine has loaded, and which of them its jobs hold. On the loop.

Who has an adapter:
    held                 as many jobs as hold it; it stays
    loaded, not held     the engine, until another one needs its place: which was held longest ago leaves first
One is loaded at a time. Its files are read once before, for their digest, so that the engine, whose steps wait while it
loads, finds them in memory.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from cluster_core.engine_jobs import Adapter
from cluster_core.errors import AdapterNotLoadedError

# Files on a host that does not answer are not waited for any longer.
LOAD_TIMEOUT_S = 120.0


class LoadedAdapters:
    """most: places. digest_of: of an adapter's folder. load, unload: what the engine does."""

    def __init__(
        self,
        most: int,
        *,
        digest_of: Callable[[str], Awaitable[str]],
        load: Callable[[Adapter], Awaitable[None]],
        unload: Callable[[str], Awaitable[None]],
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        self._most = most
        self._digest_of = digest_of
        self._load = load
        self._unload = unload
        self._timeout_s = timeout_s
        # How many jobs hold each, by digest; the one that was held longest ago first.
        self._holders: dict[str, int] = {}
        self._changing = asyncio.Lock()

    @property
    def digests(self) -> Sequence[str]:
        return tuple(self._holders)

    @asynccontextmanager
    async def holding(self, adapter: Adapter | None) -> AsyncIterator[str]:
        """See `Engine.holding`."""
        if adapter is None:
            yield ""
            return
        digest = adapter.digest
        if digest not in self._holders:
            digest = await self._loaded(adapter)
        # Nothing has run in between: it is there.
        self._holders[digest] = self._holders.pop(digest) + 1
        try:
            yield digest
        finally:
            self._holders[digest] -= 1

    async def unload(self, digest: str) -> bool:
        """See `Engine.unload_adapter`."""
        async with self._changing:
            if self._holders.get(digest) != 0:
                return False
            await self._drop(digest)
            return True

    async def _loaded(self, adapter: Adapter) -> str:
        """Its digest, once it is there. Raises AdapterNotLoadedError."""
        if not self._most:
            raise AdapterNotLoadedError("this engine takes no adapters: `lora.max_loaded` is 0")
        try:
            async with asyncio.timeout(self._timeout_s), self._changing:
                digest = await self._digest_of(adapter.path)
                if adapter.digest not in ("", digest):
                    raise AdapterNotLoadedError(f"{adapter.path} holds another adapter than `{adapter.name}` was")
                if digest not in self._holders:
                    await self._make_room(adapter)
                    await self._load(replace(adapter, digest=digest))
                    await self._check_unchanged(adapter, digest)
                    self._holders[digest] = 0
                return digest
        except TimeoutError:
            raise AdapterNotLoadedError(
                f"adapter `{adapter.name}` was not loaded within {self._timeout_s:g} s"
            ) from None

    async def _check_unchanged(self, adapter: Adapter, digest: str) -> None:
        """The engine has read the files once more. Raises AdapterNotLoadedError."""
        is_unchanged = False
        try:
            is_unchanged = await self._digest_of(adapter.path) == digest
        finally:
            if not is_unchanged:
                await self._unload(digest)
        if not is_unchanged:
            raise AdapterNotLoadedError(f"{adapter.path} was changed while `{adapter.name}` was loaded")

    async def _make_room(self, adapter: Adapter) -> None:
        while len(self._holders) >= self._most:
            free = [digest for digest, holders in self._holders.items() if not holders]
            if not free:
                raise AdapterNotLoadedError(
                    f"adapter `{adapter.name}` has no place: requests use all {self._most} of `lora.max_loaded`"
                )
            await self._drop(free[0])

    async def _drop(self, digest: str) -> None:
        """Nobody can hold it from here on."""
        del self._holders[digest]
        await self._unload(digest)
