"""The service over imitated GPUs beside the simulator, as `rachis bench simulator` sets them: the smallest comparison."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rachis import AsyncClient

from benchmarks.validation import imitated
from cluster_configs import loading
from tests.integration.conftest import own_service

pytestmark = pytest.mark.integration

# A fast GPU: nothing here is about time. One worker of each pool: what is found in a cache is no matter of chance.
FLAGS = {
    **imitated.SETTINGS,
    "engine.cost_model": "h100-llama-3.1-8b",
    "pools.prefill.workers": 1,
    "pools.decode.workers": 1,
}


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    flags = {key.replace(".", "__"): value for key, value in FLAGS.items()}
    async with own_service(tmp_path, **flags) as (_, client):
        yield client


async def test_simulator_and_service_serve_the_same_and_find_the_same(client: AsyncClient) -> None:
    config = loading.load(flags=FLAGS).config
    workloads = ("long_answers", "retrieval")
    measurement = await imitated.measure(client, config, workloads=workloads, loads=("low",), seconds=1.0)
    assert [len(run.timed) for run in measurement.runs] == [len(run.requests) for run in measurement.runs]
    for run in measurement.runs:
        for request, timed in zip(run.requests, run.timed, strict=True):
            assert (timed.prompt_tokens, len(timed.token_s)) == (request.prompt_tokens, request.output_tokens)
    assert measurement.software.hop_s > 0

    found = imitated.judged(config, measurement)
    assert {(each["workload"], each["load"]) for each in found["figures"]} == {(name, "low") for name in workloads}
    assert found["of"] == len(found["figures"]) == 16
    hits = {each["workload"]: each for each in found["figures"] if each["figure"] == "hit_ratio"}
    assert hits["long_answers"]["measured"] == hits["long_answers"]["simulated"] > 0
    assert hits["retrieval"]["measured"] == hits["retrieval"]["simulated"] == 0
