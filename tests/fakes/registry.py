"""The registry of one service in memory: a router gets registrations and the fence from it, all else if a test asks."""

from random import Random
from typing import Any

import redis.asyncio as redis
from rachis.v1 import worker_pb2 as wire

from cluster_wire import registry
from cluster_wire.members import sealed
from cluster_wire.secret import Secret
from control_plane.fleet.fencing import FENCE
from fault_sim.local_redis.client import LocalRedis
from fault_sim.local_redis.store import Store
from fault_sim.network import Network


class RegistryRedis(LocalRedis):
    """In place of `redis.asyncio.Redis`, for the routers of one service."""

    def __init__(self, service_id: str, secret: Secret | None = None) -> None:
        """secret: of the service, that registrations are sealed with."""
        super().__init__(Store(), Network(Random(0), latency_s=0.0), "router", timeout_s=1.0)
        # Claims, accesses and the rest are there as well.
        self.is_whole = False
        # Workers and the generation up to which they were kept out, in order.
        self.fenced: list[tuple[str, int]] = []
        # Keys that nothing is said of.
        self.silent: set[str] = set()
        self.can_fence = True
        self._service_id = service_id
        self._secret = secret

    def write(self, record: wire.WorkerRegistration) -> None:
        """As a worker does that registers."""
        self.store.sadd(registry.workers_key(self._service_id), record.worker_id)
        written = sealed(self._secret, record.SerializeToString())
        self.store.set(registry.worker_key(self._service_id, record.worker_id), written)

    def remove(self, worker_id: str) -> None:
        """As when its lease has ended."""
        self.store.delete(registry.worker_key(self._service_id, worker_id))

    async def eval(self, script: str, keys: int, *args: Any) -> Any:
        if script == FENCE and not self.can_fence:
            raise redis.ConnectionError("away")
        if script != FENCE and not self.is_whole:
            raise redis.ConnectionError("only the registry is there")
        answer = await super().eval(script, keys, *args)
        if script != FENCE:
            return answer
        worker_id = args[0].removeprefix(registry.worker_key(self._service_id, ""))
        self.fenced.append((worker_id, int(args[keys]) - 1))
        return answer

    async def get(self, key: str) -> Any:
        if key in self.silent:
            raise redis.ConnectionError("away")
        return await super().__getattr__("get")(key)

    def pipeline(self, *, transaction: bool) -> Any:
        if not self.is_whole:
            raise redis.ConnectionError("only the registry is there")
        return super().pipeline(transaction=transaction)
