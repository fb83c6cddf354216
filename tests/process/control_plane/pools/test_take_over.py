"""A `rachis serve` that starts again takes the workers over that have outlived the one before."""

import asyncio
import json

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_wire import registry
from tests.fakes.answers import text_of
from tests.fakes.cluster import DECODE, PREFILL, SERVICE, Cluster, named, until
from tests.process.control_plane.pools.pool_world import pools_of, quiet, sizes

RUNNING = {"prefill-0": PREFILL, "decode-0": DECODE, "decode-1": DECODE}


async def come_up(cluster: Cluster, *names: str) -> None:
    for name in names:
        await cluster.add(RUNNING[name], name)


async def test_what_runs_is_taken_over_and_nothing_is_started() -> None:
    async with pools_of() as (cluster, pools, actors):
        await come_up(cluster, *RUNNING)
        await pools.take_over(RUNNING)
        assert sizes(pools) == [(1, 1), (2, 2)]
        assert (actors.starts, actors.stops) == ([], [])
        assert text_of(await cluster.generate())


async def test_what_is_missing_is_started() -> None:
    async with pools_of() as (cluster, pools, actors):
        await come_up(cluster, "decode-1")
        await pools.take_over({"decode-1": DECODE})
        await until(lambda: sizes(pools) == [(1, 1), (2, 2)])
        assert sorted(actors.starts) == ["decode-0", "prefill-0"]


async def test_one_that_does_not_register_is_not_waited_for() -> None:
    async with pools_of(redis__worker_lease_s=0.2) as (cluster, pools, actors):
        await come_up(cluster, "prefill-0", "decode-0")
        await pools.take_over(RUNNING)
        assert sizes(pools) == [(1, 1), (2, 1)]
        await come_up(cluster, "decode-1")
        await until(lambda: sizes(pools) == [(1, 1), (2, 2)])
        assert (actors.starts, actors.stops) == ([], [])


async def test_one_that_was_on_its_way_out_leaves_and_another_one_comes_for_it() -> None:
    async with pools_of() as (cluster, pools, actors):
        await come_up(cluster, *RUNNING)
        leaving = named(cluster, "decode-1")
        leaving.record.state = wire.WORKER_STATE_DRAINING
        await cluster.register(leaving.record)
        await until(lambda: len(cluster.router.membership.usable(DECODE)) == 1)
        await pools.take_over(RUNNING)
        await until(lambda: actors.stops == ["decode-1"] and sizes(pools) == [(1, 1), (2, 2)])
        assert actors.starts == ["decode-2"]


@pytest.mark.parametrize(("size", "starts", "stops"), [(3, ["decode-2"], []), (1, [], ["decode-1"])])
async def test_a_size_that_was_asked_for_before_holds(size: int, starts: list[str], stops: list[str]) -> None:
    async with pools_of() as (cluster, pools, actors):
        await come_up(cluster, *RUNNING)
        kept = {"decode": {"size": size, "configured": 2}}
        cluster.registry.store.set(registry.sizes_key(SERVICE), json.dumps(kept))
        await pools.take_over(RUNNING)
        await until(lambda: sizes(pools) == [(1, 1), (size, size)] and (actors.starts, actors.stops) == (starts, stops))


async def test_where_nobody_knows_what_was_asked_for_it_is_what_runs() -> None:
    """More than the configuration says; nobody of a pool is left of whom none runs."""
    async with pools_of(decode=1) as (cluster, pools, actors):
        await come_up(cluster, "decode-0", "decode-1")
        cluster.registry.silent.add(registry.sizes_key(SERVICE))
        await pools.take_over({"decode-0": DECODE, "decode-1": DECODE})
        await until(lambda: sizes(pools) == [(1, 1), (2, 2)])
        assert (actors.starts, actors.stops) == (["prefill-0"], [])


async def test_what_is_asked_for_is_kept_and_whoever_leaves_ends_nobody() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        pools.resize(DECODE, 3)
        key = registry.sizes_key(SERVICE)
        await until(lambda: json.loads(cluster.registry.store.get(key) or b"{}").get("decode", {}).get("size") == 3)
        await until(lambda: sizes(pools) == [(1, 1), (3, 3)])
        await pools.stop(leave_workers=True)
        actors.left = True
        assert actors.stops == []
        assert text_of(await cluster.generate())


async def test_one_that_does_not_serve_is_started_again() -> None:
    """It was stopped, and whoever stopped it died before it could end its process."""
    async with pools_of(redis__worker_lease_s=0.2) as (cluster, pools, actors):
        await come_up(cluster, "prefill-0", "decode-0")
        actors.broken["decode-1"] = "worker decode-1 has been stopped"
        taking = asyncio.create_task(pools.take_over(RUNNING))
        await until(lambda: actors.stops == ["decode-1"])
        await taking
        await until(lambda: actors.starts == ["decode-1"])
        actors.broken.clear()
        await actors.admit()
        await until(lambda: sizes(pools) == [(1, 1), (2, 2)])
        assert actors.twice == []


async def test_what_happens_to_run_is_not_taken_for_the_size_that_was_asked_for() -> None:
    async with pools_of() as (cluster, pools, actors):
        kept = json.dumps({"decode": {"size": 4, "configured": 2}})
        cluster.registry.store.set(registry.sizes_key(SERVICE), kept)
        await come_up(cluster, "prefill-0")
        taking = asyncio.create_task(pools.take_over({"prefill-0": PREFILL}))
        while not taking.done():
            said = json.loads(cluster.registry.store.get(registry.sizes_key(SERVICE)) or b"{}")
            assert said["decode"]["size"] == 4
            await asyncio.sleep(0)
        await until(lambda: sizes(pools) == [(1, 1), (4, 4)])
        assert len(actors.starts) == 4
