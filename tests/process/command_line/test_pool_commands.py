"""`rachis scale`, `drain` and `restart` on a running service: what they wait for, and what they show."""

import json

import grpc
import pytest

from cluster_core.errors import NotFoundError
from command_line import pools as commands
from command_line.pools import parse_sizes
from tests.fakes.cluster import until
from tests.process.control_plane.pools.pool_world import pools_of, quiet


async def test_the_commands_follow_the_pools_to_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    async with pools_of() as (cluster, pools, _):
        await pools.start(quiet)
        address = cluster.router.address
        await commands.scale(address, parse_sizes(["prefill=2"]), as_json=True)
        assert json.loads(capsys.readouterr().out) == {
            "workers": {"prefill-1": "ready"},
            "pools": {"prefill": {"desired": 2, "ready": 2}, "decode": {"desired": 2, "ready": 2}},
        }
        await commands.remove(address, "decode-1", None, force=False, as_json=False)
        told = capsys.readouterr()
        assert "decode-1 has left" in told.out
        assert "decode: 1 of 1 ready" in told.out
        await commands.restart(address, ["prefill-0"], as_json=True)
        assert json.loads(capsys.readouterr().out)["workers"] == {"prefill-0": "ready"}
        await commands.set_draining(address, "prefill-1", None, draining=True, as_json=True)
        assert json.loads(capsys.readouterr().out) == {"workers": {"prefill-1": "draining"}}
        await commands.set_draining(address, "prefill-1", None, draining=False, as_json=False)
        assert capsys.readouterr().out == "prefill-1 is ready\n"


async def test_a_node_is_drained_with_all_its_workers(capsys: pytest.CaptureFixture[str]) -> None:
    async with pools_of(prefill=2) as (cluster, pools, actors):
        await pools.start(quiet)
        for worker in cluster.workers:
            worker.record.node = "h1" if worker.name in ("prefill-1", "decode-0") else "h2"
            await cluster.register(worker.record)
        await until(lambda: cluster.router.membership.get("decode-0").registration.node == "h1")  # type: ignore[union-attr]
        with pytest.raises(NotFoundError, match="no worker is on `h9`; there are workers on: h1, h2"):
            await commands.remove(cluster.router.address, None, "h9", force=False, as_json=True)
        await commands.remove(cluster.router.address, None, "h1", force=False, as_json=True)
        assert sorted(actors.stops) == ["decode-0", "prefill-1"]
        assert json.loads(capsys.readouterr().out)["pools"]["decode"] == {"desired": 1, "ready": 1}


async def test_a_node_that_has_all_that_decodes_keeps_one_of_it_though_all_are_asked_to_leave_at_once() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        for worker in cluster.workers:
            worker.record.node = "h1"
            await cluster.register(worker.record)
        await until(lambda: all(member.registration.node == "h1" for member in cluster.router.membership.members()))
        with pytest.raises(grpc.aio.AioRpcError, match="no decode worker is ready, and nothing is served"):
            await commands.remove(cluster.router.address, None, "h1", force=False, as_json=True)
        assert len(actors.stops) == 2 and "prefill-0" in actors.stops, "whichever was asked last stays"
