"""Which adapters a service has: kept by Redis, found by every router, and loaded at all workers or not served."""

from random import Random
from typing import cast

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import InvalidInputError, NotFoundError, NotSupportedError, OutOfRangeError, UnavailableError
from cluster_wire import registry
from cluster_wire.redis_client import RedisClient
from control_plane.fleet.adapters import Adapters
from control_plane.fleet.membership import Membership
from control_plane.fleet.worker_client import WorkerClient, WorkerLacksAdapterError, WorkerLostError
from fault_sim.local_redis.client import LocalRedis
from fault_sim.local_redis.store import Store
from fault_sim.network import Network

SERVICE = "svc-test"


class Workers:
    """In place of the client of the workers. folders: by worker, what it finds at a path. loaded: by worker."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, str]] = {name: {} for name in ("prefill-0", "decode-0")}
        self.loaded: dict[str, set[str]] = {name: set() for name in self.folders}
        self.is_lost = ""
        self.asked: list[str] = []
        self.busy: set[str] = set()

    async def load_adapter(self, address: str, adapter: wire.Adapter, timeout_s: float) -> str:
        name = address.split(":")[0]
        self.asked.append(name)
        if name == self.is_lost:
            raise WorkerLostError("no answer")
        if adapter.path not in self.folders[name]:
            raise WorkerLacksAdapterError(f"there is no adapter at {adapter.path}")
        digest = self.folders[name][adapter.path]
        self.loaded[name].add(digest)
        return digest

    async def unload_adapter(self, address: str, digest: str, timeout_s: float) -> bool:
        name = address.split(":")[0]
        if name == self.is_lost:
            raise WorkerLostError("no answer")
        if name not in self.busy:
            self.loaded[name].discard(digest)
        return name in self.busy


class World:
    def __init__(self, max_adapters: int = 2) -> None:
        self.store = Store()
        self.workers = Workers()
        self.membership = Membership()
        self.membership.replace(
            wire.WorkerRegistration(
                worker_id=name,
                generation=1,
                address=f"{name}:1",
                model=wire.ModelInfo(name="base", max_adapters=max_adapters),
            )
            for name in self.workers.folders
        )
        self.first, self.second = self.router(), self.router()

    def router(self) -> Adapters:
        client = LocalRedis(self.store, Network(Random(0), latency_s=0.0), "router", timeout_s=1.0)
        workers = cast(WorkerClient, self.workers)
        return Adapters(cast(RedisClient, client), SERVICE, self.membership, workers, refresh_s=0.0)

    def everywhere(self, path: str, digest: str) -> None:
        for folders in self.workers.folders.values():
            folders[path] = digest


@pytest.fixture
def world() -> World:
    made = World()
    made.everywhere("/a", "digest-a")
    made.everywhere("/b", "digest-b")
    made.everywhere("/c", "digest-c")
    return made


async def test_an_adapter_that_all_workers_have_loaded_is_served_by_every_router(world: World) -> None:
    adapter, workers = await world.first.load("a", "/a")
    assert (adapter.digest, sorted(workers)) == ("digest-a", ["decode-0", "prefill-0"])
    assert world.first.known == {"a": adapter}
    await world.second.read()
    assert world.second.known == {"a": adapter}
    assert (await world.second.load("a", "/a"))[0] == adapter


async def test_where_one_worker_fails_nothing_is_served_and_nobody_keeps_it(world: World) -> None:
    del world.workers.folders["decode-0"]["/a"]
    with pytest.raises(InvalidInputError, match="path: decode-0: there is no adapter at /a"):
        await world.first.load("a", "/a")
    assert not world.first.known
    assert world.workers.loaded == {"prefill-0": set(), "decode-0": set()}
    world.workers.is_lost = "decode-0"
    with pytest.raises(UnavailableError, match="decode-0 did not load it: no answer"):
        await world.first.load("b", "/b")


async def test_hosts_with_different_adapters_at_one_path_are_named(world: World) -> None:
    world.workers.folders["decode-0"]["/a"] = "another"
    with pytest.raises(InvalidInputError, match="different adapters there: decode-0 have another; prefill-0"):
        await world.first.load("a", "/a")


async def test_a_name_is_one_adapters_until_it_is_unloaded(world: World) -> None:
    await world.first.load("a", "/a")
    with pytest.raises(InvalidInputError, match="`a` is another adapter already, from /a: unload that first"):
        await world.second.load("a", "/b")
    assert world.workers.loaded["prefill-0"] == {"digest-a"}
    assert await world.second.unload("a") == []
    assert world.workers.loaded["prefill-0"] == set()
    await world.first.load_instead("a", "/b")
    await world.first.load_instead("a", "/c")
    assert world.first.known["a"].digest == "digest-c"
    assert world.workers.loaded["prefill-0"] == {"digest-c"}


async def test_what_has_two_names_is_kept_while_one_is_left(world: World) -> None:
    await world.first.load("a", "/a")
    await world.first.load("b", "/a")
    await world.first.unload("a")
    assert world.workers.loaded["decode-0"] == {"digest-a"}


async def test_there_are_no_more_than_workers_have_places_for(world: World) -> None:
    await world.first.load("a", "/a")
    await world.second.load("b", "/b")
    with pytest.raises(OutOfRangeError, match=r"there are 2 adapters already, lora\.max_loaded is 2"):
        await world.first.load("c", "/c")
    assert world.workers.loaded["prefill-0"] == {"digest-a", "digest-b"}
    with pytest.raises(NotSupportedError, match=r"set lora\.max_loaded"):
        await World(max_adapters=0).first.load("a", "/a")


async def test_unloading_says_who_still_has_it(world: World) -> None:
    await world.first.load("a", "/a")
    world.workers.busy.add("prefill-0")
    world.workers.is_lost = "decode-0"
    assert await world.first.unload("a") == ["decode-0", "prefill-0"]
    assert not world.first.known
    with pytest.raises(NotFoundError, match="no adapter `a`; there are: none"):
        await world.first.unload("a")


async def test_a_redis_that_lost_its_data_is_told_again_and_one_that_kept_it_is_believed(world: World) -> None:
    await world.first.load("a", "/a")
    await world.first.load("b", "/b")
    await world.second.read()
    world.store.delete(registry.adapters_key(SERVICE))
    await world.second.read()
    third = world.router()
    await third.read()
    await world.first.read()
    assert third.known == world.first.known == world.second.known
    assert len(third.known) == 2
    await third.unload("a")
    await third.unload("b")
    await world.first.read()
    assert not world.first.known, "all were unloaded, which is not the same as lost"


async def test_a_router_that_knows_nothing_takes_nothing_from_the_others_when_redis_has_lost_all(world: World) -> None:
    await world.first.load("a", "/a")
    world.store.delete(registry.adapters_key(SERVICE))
    await world.second.load("b", "/b")
    await world.first.read()
    await world.second.read()
    assert sorted(world.first.known) == sorted(world.second.known) == ["a", "b"]


async def test_one_too_many_is_refused_before_anybody_loads_it(world: World) -> None:
    await world.first.load("a", "/a")
    await world.first.load("b", "/b")
    world.workers.asked.clear()
    with pytest.raises(OutOfRangeError):
        await world.second.load("c", "/c")
    assert not world.workers.asked


async def test_the_same_adapter_from_another_folder_is_found_there_from_then_on(world: World) -> None:
    world.everywhere("/new", "digest-a")
    await world.first.load("a", "/a")
    assert (await world.second.load("a", "/new"))[0].path == "/new"
    await world.first.read()
    assert world.first.known["a"].path == "/new"


async def test_before_redis_has_been_read_nobody_is_told_that_there_are_none(world: World) -> None:
    world.store.is_down = True
    await world.first.start()
    with pytest.raises(UnavailableError, match="not known yet"):
        world.first.views()
    world.store.is_down = False
    await world.first.start()
    assert (world.first.views().model, list(world.first.views().adapters)) == ("base", [])


async def test_while_redis_is_away_what_is_known_stays_and_nothing_changes(world: World) -> None:
    adapter, _ = await world.first.load("a", "/a")
    world.store.is_down = True
    with pytest.raises(UnavailableError, match="Redis does not answer, adapters stay as they are"):
        await world.first.load("b", "/b")
    with pytest.raises(UnavailableError, match="Redis does not answer"):
        await world.first.unload("a")
    assert world.first.known == {"a": adapter}


async def test_a_damaged_record_is_left_out(world: World) -> None:
    await world.first.load("a", "/a")
    world.store.hset(registry.adapters_key(SERVICE), "b", b"\xff\xff")
    await world.first.read()
    assert list(world.first.known) == ["a"]
