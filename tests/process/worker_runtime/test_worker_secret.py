"""A worker whose host has the service's secret: how it speaks from its start."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_wire.members import member_metadata
from cluster_wire.secret import read_secret, write_secret
from cluster_wire.worker_tls import worker_channel
from tests.fakes.redis_server import running_redis
from tests.process.worker_runtime.test_worker_host import WORKER, Engine, ready, start, stopped


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with running_redis(tmp_path) as url:
        yield url


async def test_a_worker_with_a_secret_speaks_encrypted_from_its_start(server: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_secret(path)
    secret = read_secret(path)
    host = start(server, Engine(), engine__secret_file=str(path), secret_fingerprint=secret.fingerprint)
    record = await ready(host)
    request = wire.GetWorkerStatusRequest()

    async with worker_channel(secret)(record.address) as channel:
        answer = await worker_pb2_grpc.WorkerServiceStub(channel).GetWorkerStatus(
            request, metadata=member_metadata(secret), timeout=60
        )
        # Whether it lives may be asked without a key all the same.
        alive = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    async with grpc.aio.insecure_channel(record.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await worker_pb2_grpc.WorkerServiceStub(channel).GetWorkerStatus(request, timeout=60)

    assert answer.registration.worker_id == WORKER and alive.status == health_pb2.HealthCheckResponse.SERVING
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await stopped(host)
