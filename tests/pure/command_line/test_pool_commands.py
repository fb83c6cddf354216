"""`rachis scale`, `drain`, `restart`: what they take, and what they show."""

import pytest

from cluster_core.errors import ConfigError
from command_line.pools import parse_sizes
from tests.command import rachis


def test_sizes_are_read_pool_by_pool() -> None:
    request = parse_sizes(["prefill=3", "decode=2"])
    assert (request.prefill_workers, request.decode_workers) == (3, 2)
    only = parse_sizes(["decode=2"])
    assert not only.HasField("prefill_workers")
    assert parse_sizes(["shared=4"]).shared_workers == 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["decode"], "prefill=N, decode=N or shared=N"),
        (["decode=-1"], "prefill=N, decode=N or shared=N"),
        (["decode=two"], "prefill=N, decode=N or shared=N"),
        (["encode=1"], "prefill=N, decode=N or shared=N"),
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
        (["scale", "decode=1", "--address", "127.0.0.1:1,127.0.0.1:2"], "takes one router here"),
        (["route"], "service.name: must be that of the running service"),
        (
            ["route", "--set", "router.share_port=true", "--set", "router.admin_port=1"],
            "`rachis route --processes` alone",
        ),
        (["route", "--processes", "2", "--number", "1"], "--number: is one of several"),
        (["route", "--set", "service.name=chat"], "redis.url: must be that of the running service"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: list[str], says: str) -> None:
    result = rachis(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
