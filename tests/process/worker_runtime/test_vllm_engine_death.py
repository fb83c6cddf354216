"""Callers of a vLLM engine that has died get an answer; no engine is started here, and vLLM is not imported."""

import asyncio
import threading

import pytest

from cluster_configs.schema import RachisConfig
from cluster_core.engine_jobs import EngineJob, SamplingSpec
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


class Dying:
    """An engine's thread from the moment a turn of it raises; ended with the block."""

    def __init__(self, engine: VllmEngine) -> None:
        def raises() -> None:
            raise ZeroDivisionError("of a test")

        self.deaths: list[str] = []
        self._engine = engine
        engine._turn = raises  # type: ignore[method-assign]
        self._thread = threading.Thread(target=engine._work, args=(self.deaths.append,))

    async def __aenter__(self) -> "Dying":
        self._thread.start()
        await until(lambda: bool(self.deaths))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.stop()
        await asyncio.to_thread(self._thread.join)


async def test_its_owner_hears_of_the_death(engine: VllmEngine) -> None:
    async with Dying(engine) as dying:
        assert dying.deaths == ["ZeroDivisionError: of a test"]


async def test_a_job_after_the_death_is_unavailable(engine: VllmEngine) -> None:
    async with Dying(engine):
        with pytest.raises(UnavailableError, match="the engine died: ZeroDivisionError: of a test"):
            await anext(engine.generate(JOB))


async def test_a_job_that_the_engine_had_not_taken_yet_is_unavailable(engine: VllmEngine) -> None:
    waiting = asyncio.ensure_future(anext(engine.generate(JOB)))
    await until(lambda: not engine._commands.empty())

    async with Dying(engine), asyncio.timeout(1.0):
        with pytest.raises(UnavailableError):
            await waiting


async def test_a_job_of_a_stopped_engine_is_unavailable(engine: VllmEngine) -> None:
    waiting = asyncio.ensure_future(anext(engine.generate(JOB)))
    await until(lambda: not engine._commands.empty())
    await engine.stop()

    engine._work(lambda why: None)

    async with asyncio.timeout(1.0):
        with pytest.raises(UnavailableError, match="it was stopped"):
            await waiting


async def test_a_release_after_the_death_is_answered(engine: VllmEngine) -> None:
    async with Dying(engine), asyncio.timeout(1.0):
        assert await engine.release("r#1") is False


async def test_a_dead_engine_has_no_hottest_prefixes(engine: VllmEngine) -> None:
    async with Dying(engine):
        assert await engine.hottest_prefixes(5) == ()
