"""Hot prefixes are copied before their holders are saturated, within bounds, and given up when they cool."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import UnavailableError
from cluster_wire.redis_client import connect
from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.recent_prompts import RecentPrompt, RecentPrompts
from control_plane.placement.replication import Copy, Demand, Replication
from control_plane.placement.replicator import CopyTiming, Replicator
from control_plane.prefix_index.hot_prefix import HotPrefix
from kv_transfer.claims.prefix_chunks import chunk_keys
from tests.fakes.redis_server import running_redis
from tests.pure.control_plane.placement.test_placer import CHUNK, World, prompt

IDLE = {"a": 0.0, "b": 0.0, "c": 0.0}


def demand(rate: float, *holders: str, key: int = 7, request_s: float = 0.1) -> Demand:
    return Demand(HotPrefix(key, 4, rate, holders, ()), request_s)


def test_a_prefix_that_asks_for_too_much_of_its_holder_is_copied_to_the_idlest_other() -> None:
    plan = Replication(load=0.5, replicas=4)
    assert plan.next_copy([demand(4.9, "a")], IDLE, 0.0) is None
    assert plan.next_copy([demand(5.1, "a")], {**IDLE, "b": 0.05, "c": 0.01}, 0.0) == Copy(7, 4, "c")
    assert plan.next_copy([demand(5.1, "a", "b")], IDLE, 0.0) is None, "two holders share it"
    assert plan.next_copy([demand(5.1, "a"), demand(9.0, "b", key=8)], IDLE, 0.0) == Copy(8, 4, "a"), (
        "the hottest first"
    )


def test_copies_are_bounded() -> None:
    plan = Replication(load=0.1, replicas=2)
    workers = {f"w{number}": 0.0 for number in range(10)}
    made = []
    while (copy := plan.next_copy([demand(1000.0, "w0")], workers, 0.0)) is not None:
        plan.made(copy, 0.0)
        made.append(copy.worker_id)
    assert made == ["w1", "w2"]


def test_a_copy_is_not_made_where_there_is_no_time_for_it() -> None:
    plan = Replication(load=0.1, replicas=2)
    assert plan.next_copy([demand(10.0, "a")], {"a": 1.0, "b": 1.2}, 0.0) is None
    assert plan.next_copy([demand(10.0, "a")], {"a": 1.0, "b": 1.05}, 0.0) == Copy(7, 4, "b")


def test_a_prefix_that_nobody_holds_or_everybody_holds_is_left_alone() -> None:
    plan = Replication(load=0.1, replicas=9)
    assert plan.next_copy([demand(10.0)], IDLE, 0.0) is None
    assert plan.next_copy([demand(10.0, "gone")], IDLE, 0.0) is None
    assert plan.next_copy([demand(100.0, *IDLE)], IDLE, 0.0) is None


def test_what_has_cooled_is_given_up_and_may_be_copied_again() -> None:
    plan = Replication(load=0.5, replicas=4)
    plan.made(Copy(7, 4, "b"), 0.0)
    assert plan.next_copy([demand(4.0, "a")], IDLE, 0.0) is None and plan.copies == {7: {"b": 0.0}}, "not yet"
    assert plan.next_copy([demand(2.0, "a")], IDLE, 0.0) is None and plan.copies == {} and plan.given_up == 1
    assert plan.next_copy([demand(6.0, "a")], IDLE, 0.0) == Copy(7, 4, "b")
    plan.made(Copy(7, 4, "b"), 0.0)
    plan.next_copy([], IDLE, 0.0)
    assert plan.copies == {}, "nobody asks for it any more"


def test_a_copy_counts_as_held_until_the_worker_must_have_told_of_it() -> None:
    plan = Replication(load=0.1, replicas=1)
    plan.made(Copy(7, 4, "b"), 100.0)
    two = {"a": 0.0, "b": 0.0}
    assert plan.next_copy([demand(10.0, "a")], two, 109.0) is None
    assert plan.next_copy([demand(10.0, "a")], two, 110.0) == Copy(7, 4, "b"), "it has evicted it, or was started again"


def test_what_has_failed_is_not_tried_again_at_once() -> None:
    plan = Replication(load=0.1, replicas=1)
    plan.failed(Copy(7, 4, "b"), 100.0)
    assert plan.next_copy([demand(10.0, "a")], IDLE, 101.0) == Copy(7, 4, "c")
    assert plan.next_copy([demand(10.0, "a")], {"a": 0.0, "b": 0.0}, 129.0) is None
    assert plan.next_copy([demand(10.0, "a")], {"a": 0.0, "b": 0.0}, 130.0) == Copy(7, 4, "b")


# Prompts.


def recent(tokens: list[int], expected_s: float = 0.1) -> RecentPrompt:
    return RecentPrompt(np.array(tokens, dtype=np.uint32), chunk_keys(tokens, 7, CHUNK), PrefixScope(), expected_s)


def test_recent_prompts_are_bounded_in_number_and_in_bytes() -> None:
    prompts = RecentPrompts(1000 * 4 + 8 * 1000 // CHUNK, most_prompts=5)
    for seed in range(20):
        prompts.add(recent(prompt(seed)))
    assert len(prompts) == 5
    prompts.add(recent(prompt(99, 990)))
    assert len(prompts) == 1


def test_prompts_are_found_by_their_prefix() -> None:
    prompts = RecentPrompts(1 << 20)
    shared = prompt(1)
    for seed in (2, 3):
        prompts.add(recent([*shared, *prompt(seed, 50)]))
    prompts.add(recent(prompt(4)))
    key = int(chunk_keys(shared, 7, CHUNK)[-1])
    found = prompts.with_prefix(key, 10)
    assert [each.token_ids.tolist() for each in found] == [[*shared, *prompt(seed, 50)] for seed in (3, 2)]
    assert prompts.with_prefix(key, 9) == []


# The shell.


class Workers:
    """Takes prefills down; `fault` is raised instead."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests: list[tuple[str, wire.PrefillRequest]] = []
        self.queue_s: list[float] = []
        self.fault: Exception | None = None

    async def prefill(self, worker: Any, request: wire.PrefillRequest, timeout_s: float) -> None:
        self.queue_s.append(self.world.placer.prefill_queues()[worker.worker_id])
        if self.fault is not None:
            raise self.fault
        self.requests.append((worker.worker_id, request))


@pytest.fixture
def hot() -> World:
    """p0 holds a prefix that one tenant asks for five times a second."""
    world = World()
    world.holds("p0", prompt(1), salt="tenant")
    for number in range(2000):
        world.now_s += 0.2
        job = world.job([*prompt(1), *prompt(number + 2, 150)], salt="tenant")
        assert world.placer.place(job, wire.POOL_PREFILL) is not None
        world.index.accessed(world.placer.packed(job.token_ids, PrefixScope("tenant")).keys, world.now_s)
    return world


def replicator(world: World, load: float) -> tuple[Replicator, Workers]:
    workers = Workers(world)
    redis = connect("redis://127.0.0.1:1", 2.0)
    plan = Replication(load, 4)
    made = Replicator(redis, "s", "router", world.placer, workers, plan, now_s=lambda: world.now_s)  # type: ignore[arg-type]
    return made, workers


async def test_a_hot_prefix_is_prefilled_on_another_worker(hot: World) -> None:
    """150 tokens of a millisecond, five times a second: three quarters of p0's time."""
    calm, _ = replicator(hot, 0.8)
    assert await calm.step() is None
    busy, workers = replicator(hot, 0.7)

    copy = await busy.step()

    assert copy is not None and (copy.worker_id, busy.copies, busy.failed) == ("p1", 1, 0)
    ((worker, request),) = workers.requests
    assert worker == "p1" and list(request.token_ids) == prompt(1) and request.cache_salt == "tenant"
    assert (request.sampling.max_tokens, request.hand_off, request.generation) == (1, False, 1)
    assert workers.queue_s[0] == pytest.approx(0.16), "it counts as work of that worker"
    assert hot.placer.prefill_queues()["p1"] == 0
    assert await busy.step() is None, "p1 has it now"


async def test_a_copy_that_fails_is_counted_and_tried_again(hot: World) -> None:
    busy, workers = replicator(hot, 0.5)
    workers.fault = UnavailableError("no", retry_after_ms=1)
    assert await busy.step() is None and (busy.copies, busy.failed) == (0, 1)
    workers.fault = None
    assert await busy.step() is None, "not at once"
    hot.now_s += 30.0
    hot.index.expire(hot.now_s)
    assert await busy.step() is not None


@pytest.mark.integration
async def test_one_router_makes_copies_and_another_one_takes_over(tmp_path: Path, hot: World) -> None:
    steps: list[str] = []
    with running_redis(tmp_path) as url:
        routers = {}
        for name in ("first", "second"):
            made: Any = Replicator(
                connect(url, 2.0),
                "s",
                name,
                hot.placer,
                Workers(hot),  # type: ignore[arg-type]
                Replication(1.0, 1),
                timing=CopyTiming(every_s=0.02, lease_ms=500),
            )

            async def step(name: str = name) -> None:
                steps.append(name)

            made.step = step
            routers[name] = made
        first = asyncio.create_task(routers["first"].run())
        await _until(lambda: len(steps) > 2)
        second = asyncio.create_task(routers["second"].run())
        await asyncio.sleep(0.7)
        assert set(steps) == {"first"}, "the lease is renewed"
        first.cancel()
        await _until(lambda: "second" in steps)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        for made in routers.values():
            await made.close()


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - what is waited for is a list
            await asyncio.sleep(0.01)
