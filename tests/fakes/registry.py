"""A Redis that knows the registrations of workers and their fence: whatever else is asked of it finds it away."""

from typing import Any, NoReturn

import redis.asyncio as redis
from rachis import registry
from rachis.v1 import worker_pb2 as wire

from control_plane.fleet.fencing import FENCE


class RegistryRedis:
    """In place of `redis.asyncio.Redis`, for routers of one service."""

    def __init__(self, service_id: str) -> None:
        # What workers have registered, by name.
        self.records: dict[str, wire.WorkerRegistration] = {}
        # Workers and the generation up to which they were kept out, in order.
        self.fenced: list[tuple[str, int]] = []
        self._service_id = service_id

    async def smembers(self, key: str) -> set[bytes]:
        assert key == registry.workers_key(self._service_id)
        return {name.encode() for name in self.records}

    async def mget(self, keys: list[str]) -> list[bytes | None]:
        known = {registry.worker_key(self._service_id, name): record for name, record in self.records.items()}
        return [known[key].SerializeToString() if key in known else None for key in keys]

    async def eval(self, script: str, _keys: int, record_key: str, *arguments: Any) -> int:
        if script != FENCE:
            raise redis.ConnectionError("only the registry is there")
        worker_id = record_key.removeprefix(registry.worker_key(self._service_id, ""))
        generation = int(arguments[1]) - 1
        self.fenced.append((worker_id, generation))
        record = self.records.get(worker_id)
        if record is not None and record.generation <= generation:
            del self.records[worker_id]
        return 1

    def pipeline(self, *, transaction: bool) -> NoReturn:
        raise redis.ConnectionError("only the registry is there")

    async def aclose(self) -> None:
        pass
