"""How a router shares its loads with the others through Redis, and when it forgets theirs."""

import asyncio
from random import Random
from typing import Any, cast

import pytest
import redis
from rachis.v1 import worker_pb2 as wire

from cluster_wire.redis_client import RedisClient
from control_plane.fleet.load_sharing import LoadSharing
from control_plane.fleet.membership import Membership
from fault_sim.local_redis.client import LocalRedis
from fault_sim.local_redis.store import Store
from fault_sim.network import Network
from tests import simulated_time


class Failing(LocalRedis):
    """Raises what it is told to."""

    error: Exception | None = None

    def pipeline(self, *, transaction: bool) -> Any:
        if self.error is not None:
            raise self.error
        return super().pipeline(transaction=transaction)


@pytest.mark.parametrize("error", [redis.ConnectionError("away"), ValueError("a defect")])
def test_what_others_said_counts_no_more_while_nothing_new_can_be_heard(error: Exception) -> None:
    membership = Membership()
    membership.others.heard("other", wire.RouterLoads(number=1), 0.0)

    async def follows() -> None:
        failing = Failing(Store(), Network(Random(0), latency_s=0.0), "router", timeout_s=1.0)
        failing.error = error
        sharing = LoadSharing(cast(RedisClient, failing), "svc", membership, router_id="one", every_s=0.02)
        task = asyncio.create_task(sharing.follow())
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    simulated_time.run(follows())
    assert len(membership.others) == 0
