"""A worker stays while it is kept or of use, and for a while after that."""

import json
from collections.abc import Callable
from typing import cast

import pytest
import redis.asyncio as redis

from cluster_core.ids import registry_digest
from cluster_wire import registry
from cluster_wire.redis_client import RedisClient
from tests.fakes.registry import RegistryRedis
from worker_runtime.orphans import Keeper, OrphanWatch, until_orphaned

HERE = "redis://:secret@here/0"


def test_it_is_an_orphan_once_nobody_has_kept_it_and_nothing_has_come_for_so_long() -> None:
    watch = OrphanWatch(60.0, now_s=0.0)
    assert not watch.looked(30.0, is_kept=True, work=7)
    assert not watch.looked(89.0, is_kept=False, work=7)
    assert watch.looked(90.0, is_kept=False, work=7)


def test_work_and_a_service_that_comes_back_begin_the_time_anew() -> None:
    watch = OrphanWatch(60.0, now_s=0.0)
    assert not watch.looked(1.0, is_kept=False, work=7)
    assert not watch.looked(59.0, is_kept=False, work=None)
    assert not watch.looked(60.0, is_kept=False, work=8), "it came between two looks"
    assert not watch.looked(118.0, is_kept=False, work=8)
    assert not watch.looked(119.0, is_kept=True, work=8)
    assert not watch.looked(178.0, is_kept=False, work=8)
    assert watch.looked(179.0, is_kept=False, work=8)


def test_while_nothing_is_known_four_times_as_long_is_waited() -> None:
    watch = OrphanWatch(60.0, now_s=0.0)
    assert not watch.looked(0.0, is_kept=None, work=7)
    assert not watch.looked(239.0, is_kept=None, work=7)
    assert watch.looked(240.0, is_kept=None, work=7)


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [
        (json.dumps({"keeps": registry_digest(HERE)}), True),
        (json.dumps({"keeps": registry_digest("redis://there/0")}), False),
        (json.dumps({"keeps": ""}), False),
        (json.dumps({"host": "h", "pid": 7}), False),
        ("[]", False),
        ("no JSON", False),
        (None, False),
    ],
)
async def test_whoever_has_the_name_keeps_it_if_it_takes_over_workers_of_this_redis(
    value: str | None, is_kept: bool
) -> None:
    server = RegistryRedis("chat")
    if value is not None:
        server.store.set(registry.lease_key("chat"), value)
    assert await Keeper(cast(RedisClient, server), "chat", HERE).is_there() is is_kept


class Answers:
    """A Redis that answers so, one after the other."""

    def __init__(self, *answers: Callable[[], bytes | None]) -> None:
        self.left = list(answers)
        self.is_closed = False

    async def get(self, _key: str) -> bytes | None:
        return self.left.pop(0)() if self.left else None

    async def aclose(self) -> None:
        self.is_closed = True


def away() -> bytes:
    raise redis.ConnectionError("away")


def broken() -> bytes:
    raise KeyError("a defect")


async def test_neither_a_defect_nor_a_redis_that_is_away_makes_an_orphan_of_a_worker_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = Answers(broken, away, broken)
    now_s = iter(float(number) for number in range(100))
    keeper = Keeper(cast(RedisClient, answers), "chat", HERE)

    await until_orphaned(keeper, 3.0, lambda: 7, look_s=0.0, now_s=lambda: next(now_s))

    assert not answers.left and answers.is_closed
    assert caplog.text.count("it could not be looked who keeps this worker") == 2
