"""`rachis scale`, `drain`, `restart`: what they take, and what they show."""

import json

import pytest
from typer.testing import CliRunner

from cluster_core.errors import ConfigError, NotFoundError
from command_line import pools as commands
from command_line.main import app
from command_line.pools import parse_sizes
from tests.fakes.cluster import until
from tests.process.control_plane.pools.test_pools import pools_of, quiet


def test_sizes_are_read_pool_by_pool() -> None:
    request = parse_sizes(["prefill=3", "decode=2"])
    assert (request.prefill_workers, request.decode_workers) == (3, 2)
    only = parse_sizes(["decode=2"])
    assert not only.HasField("prefill_workers")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["decode"], "prefill=N or decode=N"),
        (["decode=-1"], "prefill=N or decode=N"),
        (["decode=two"], "prefill=N or decode=N"),
        (["encode=1"], "prefill=N or decode=N"),
        (["decode=99999999999"], "at most 1024 workers"),
        (["decode=1", "decode=2"], "decode is given twice"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(given: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_sizes(given)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["drain", "decode-0", "--stay", "--resume", "--address", "127.0.0.1:1"], "cannot go with --resume"),
        (["drain", "--address", "127.0.0.1:1"], "name a worker, or a host"),
        (["drain", "decode-0", "--node", "h1", "--address", "127.0.0.1:1"], "name a worker, or a host"),
        (["restart", "--address", "127.0.0.1:1"], "one after the other"),
        (["route"], "service.name: must be that of the running service"),
        (["route", "--set", "service.name=chat"], "redis.url: must be that of the running service"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)


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
