"""Callers of a vLLM engine that has died get an answer; no engine is started here, and vLLM is not imported."""

import asyncio

import pytest

from cluster_configs.schema import RachisConfig
from cluster_core.engine import EngineJob, SamplingSpec
from cluster_core.errors import UnavailableError
from tests.fakes.cluster import until
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.vllm_engine import VllmEngine

JOB = EngineJob("job-1", (1, 2, 3), SamplingSpec())


@pytest.fixture
async def engine() -> VllmEngine:
    config = RachisConfig()
    engine = VllmEngine(EngineSettings(config.model, config.engine, config.handoff, EngineRole.PREFILL))
    engine._loop = asyncio.get_running_loop()
    return engine


def died(engine: VllmEngine) -> list[str]:
    """What the engine's thread does when a step raises."""
    deaths: list[str] = []
    engine._die("of a test", deaths.append)
    return deaths


async def test_its_owner_hears_of_the_death(engine: VllmEngine) -> None:
    assert died(engine) == ["of a test"]


async def test_a_job_after_the_death_is_unavailable(engine: VllmEngine) -> None:
    died(engine)

    with pytest.raises(UnavailableError, match="the engine died: of a test"):
        await anext(engine.generate(JOB))


@pytest.mark.xfail(strict=True, raises=TimeoutError, reason="defect: what waits in the queue at the death hangs")
async def test_a_job_that_the_engine_had_not_taken_yet_is_unavailable(engine: VllmEngine) -> None:
    waiting = asyncio.ensure_future(anext(engine.generate(JOB)))
    await until(lambda: not engine._commands.empty())

    died(engine)

    async with asyncio.timeout(0.2):
        with pytest.raises(UnavailableError):
            await waiting


@pytest.mark.xfail(strict=True, raises=TimeoutError, reason="defect: nobody answers a release after the death")
async def test_a_release_after_the_death_is_answered(engine: VllmEngine) -> None:
    died(engine)

    async with asyncio.timeout(0.2):
        assert await engine.release("r#1") is False
