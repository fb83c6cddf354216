"""A worker whose host Ray has given up does not get back into the registry; its next start does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.ports import hold_port
from cluster_wire.redis_client import connect
from control_plane.fleet.fencing import Fence
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from tests.fakes.redis_server import running_redis
from worker_runtime.registration import Registration

SERVICE = "svc-fence"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("redis")
    with running_redis(folder) as address:
        yield address


def registration(url: str) -> tuple[Registration, wire.WorkerRegistration]:
    record = wire.WorkerRegistration(worker_id="prefill-0", state=wire.WORKER_STATE_READY)
    return Registration(connect(url, 5.0), SERVICE, record, 5.0), record


async def registered(url: str) -> list[int]:
    follower = RegistryFollower(connect(url, 2.0), SERVICE, Membership(), refresh_s=1, worker_lease_s=1)
    try:
        return [record.generation for record in await follower.read()]
    finally:
        await follower.close()


async def test_what_comes_back_is_kept_out_and_the_next_start_comes_in(url: str) -> None:
    cut_off, old = registration(url)
    await cut_off.open()
    await cut_off.publish()
    assert await registered(url) == [old.generation]

    fence = Fence(connect(url, 2.0), SERVICE)
    assert await fence.close_out("prefill-0", old.generation)
    await cut_off.publish()
    assert await registered(url) == []

    again, new = registration(url)
    await again.open()
    await again.publish()
    assert await registered(url) == [new.generation]
    assert new.generation > old.generation
    # The fence is never below what has come after it.
    assert await fence.close_out("prefill-0", old.generation)
    await again.publish()
    assert await registered(url) == [new.generation]
    for each in (cut_off, again, fence):
        await each.close()


async def test_without_redis_it_says_so_and_may_be_tried_again() -> None:
    fence = Fence(connect(f"redis://127.0.0.1:{hold_port('127.0.0.1')}/0", 2.0), SERVICE)
    assert not await fence.close_out("prefill-0", 1)
    await fence.close()
