"""Adapters of an engine come one at a time, once each, and whoever leaves meanwhile leaves nothing behind."""

import asyncio

import pytest

from cluster_core.engine_jobs import Adapter
from cluster_core.errors import AdapterNotLoadedError
from tests.fakes.cluster import until
from worker_runtime.loaded_adapters import LoadedAdapters


class Host:
    """What the engine and its disk do. gate: loads wait for it. done: what was loaded and unloaded, in order."""

    def __init__(self, most: int = 2, timeout_s: float = 60.0) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.done: list[str] = []
        self.waiting = 0
        self.fails = False
        # A path whose files are others once they have been loaded.
        self.changing = ""
        self.adapters = LoadedAdapters(
            most, digest_of=self._digest, load=self._load, unload=self._unload, timeout_s=timeout_s
        )

    async def _digest(self, path: str) -> str:
        return path.upper() + ("!" if path == self.changing and self.waiting else "")

    async def _load(self, adapter: Adapter) -> None:
        self.waiting += 1
        await self.gate.wait()
        if self.fails:
            raise AdapterNotLoadedError("of a test")
        self.done.append(f"+{adapter.digest}")

    async def _unload(self, digest: str) -> None:
        self.done.append(f"-{digest}")

    async def hold(self, path: str, until_set: asyncio.Event) -> str:
        async with self.adapters.holding(Adapter(path, path)) as digest:
            await until_set.wait()
            return digest


async def test_several_that_want_one_load_it_once() -> None:
    host, end = Host(), asyncio.Event()
    host.gate.clear()
    tasks = [asyncio.create_task(host.hold("a", end)) for _ in range(3)]
    await until(lambda: host.waiting == 1)
    host.gate.set()
    await until(lambda: len(host.adapters.digests) == 1)
    end.set()
    assert await asyncio.gather(*tasks) == ["A"] * 3
    assert host.done == ["+A"]


async def test_what_does_not_load_is_not_there_and_may_be_tried_again() -> None:
    host, end = Host(), asyncio.Event()
    end.set()
    host.fails = True
    with pytest.raises(AdapterNotLoadedError, match="of a test"):
        await host.hold("a", end)
    assert not host.adapters.digests
    host.fails = False
    assert await host.hold("a", end) == "A"


async def test_a_load_that_takes_too_long_is_given_up_and_the_next_one_may_begin() -> None:
    host, end = Host(timeout_s=0.0), asyncio.Event()
    end.set()
    host.gate.clear()
    with pytest.raises(AdapterNotLoadedError, match=r"adapter `a` was not loaded within 0 s"):
        await host.hold("a", end)
    host.gate.set()
    assert await host.hold("b", end) == "B"
    assert list(host.adapters.digests) == ["B"]


async def test_whoever_leaves_while_it_loads_holds_nothing() -> None:
    host, end = Host(most=1), asyncio.Event()
    host.gate.clear()
    first = asyncio.create_task(host.hold("a", end))
    await until(lambda: host.waiting == 1)
    first.cancel()
    await asyncio.wait({first})
    host.gate.set()
    end.set()
    assert await host.hold("b", end) == "B"
    assert list(host.adapters.digests) == ["B"]


async def test_files_that_change_while_they_are_loaded_are_not_what_was_asked_for() -> None:
    host, end = Host(), asyncio.Event()
    end.set()
    host.changing = "a"
    with pytest.raises(AdapterNotLoadedError, match="a was changed while `a` was loaded"):
        await host.hold("a", end)
    assert (host.done, list(host.adapters.digests)) == (["+A", "-A"], [])


async def test_a_holder_that_fails_gives_it_back() -> None:
    host = Host(most=1)
    with pytest.raises(ZeroDivisionError):
        async with host.adapters.holding(Adapter("a", "a")):
            raise ZeroDivisionError
    async with host.adapters.holding(Adapter("b", "b")):
        assert host.done == ["+A", "-A", "+B"]


async def test_without_places_there_are_no_adapters() -> None:
    with pytest.raises(AdapterNotLoadedError, match=r"`lora\.max_loaded` is 0"):
        async with Host(most=0).adapters.holding(Adapter("a", "a")):
            raise AssertionError("it has a place")
    async with Host(most=0).adapters.holding(None) as digest:
        assert digest == ""
