"""Callers of a vLLM engine that has died get an answer, and it tells when its copies hang.

No engine is started here, and vLLM is not imported.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cluster_configs.schema import RachisConfig
from cluster_core.clock import ClusterClock
from cluster_core.engine_jobs import EngineJob, SamplingSpec
from cluster_core.engine_reports import PrefixClaims
from cluster_core.errors import StartError, UnavailableError
from tests.fakes.cluster import until
from tests.fakes.idle_engine import INFO, IdleWork, idle_vllm
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.engine_work import EngineWork
from worker_runtime.vllm_engine import VllmEngine

JOB = EngineJob("job-1", (1, 2, 3), SamplingSpec())


class Trial:
    """An engine that has not started yet."""

    def __init__(self) -> None:
        config = RachisConfig()
        settings = EngineSettings(config.model, config.engine, config.handoff, EngineRole.ALONE)
        self.dies_at_once = False
        self.deaths: list[str] = []
        self.engine = VllmEngine(settings, bring_up=partial(self._bring_up, settings))

    async def start(self) -> None:
        await self.engine.start(lambda phase: None, self.deaths.append)

    async def die(self) -> None:
        await self.engine.look(lambda work: setattr(work, "dies", True))
        await until(lambda: bool(self.deaths))

    def _bring_up(
        self, settings: EngineSettings, on_phase: Callable[[str], None], on_loop: Callable[..., object]
    ) -> EngineWork:
        work = IdleWork(idle_vllm(), INFO, settings, ClusterClock(), on_loop)
        work.dies = self.dies_at_once
        return work


@pytest.fixture
async def trial() -> Any:
    trial = Trial()
    yield trial
    await trial.engine.stop()


async def test_its_owner_hears_of_the_death(trial: Trial) -> None:
    await trial.start()
    await trial.die()

    assert trial.deaths == ["ZeroDivisionError: of a test"]


async def test_a_job_after_the_death_is_unavailable(trial: Trial) -> None:
    await trial.start()
    await trial.die()

    with pytest.raises(UnavailableError, match="the engine died: ZeroDivisionError: of a test"):
        await anext(trial.engine.generate(JOB))


async def test_a_job_that_the_engine_had_not_taken_yet_is_unavailable(trial: Trial) -> None:
    trial.dies_at_once = True
    waiting = asyncio.ensure_future(anext(trial.engine.generate(JOB)))
    await asyncio.sleep(0)
    await trial.start()

    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError, match="the engine died"):
            await waiting


async def test_a_job_of_a_stopped_engine_is_unavailable(trial: Trial) -> None:
    waiting = asyncio.ensure_future(anext(trial.engine.generate(JOB)))
    await asyncio.sleep(0)
    await trial.engine.stop()
    await trial.start()

    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError, match="it was stopped"):
            await waiting


async def test_a_release_after_the_death_is_answered(trial: Trial) -> None:
    await trial.start()
    await trial.die()

    async with asyncio.timeout(60):
        assert await trial.engine.release("r#1") is False


async def test_a_dead_engine_has_no_hottest_prefixes_and_no_batch_and_claims_nothing(trial: Trial) -> None:
    await trial.start()
    await trial.die()

    assert await trial.engine.hottest_prefixes(5) == ()
    assert (await trial.engine.decode_batch(5)).groups == ()
    assert await trial.engine.prefix_claims() == PrefixClaims()


async def test_what_is_raised_while_it_starts_is_why_it_did_not() -> None:
    config = RachisConfig()
    settings = EngineSettings(config.model, config.engine, config.handoff, EngineRole.ALONE)

    def fails(on_phase: Callable[[str], None], on_loop: Callable[..., object]) -> EngineWork:
        raise ValueError("no model")

    with pytest.raises(StartError, match="the engine did not start: ValueError: no model"):
        await VllmEngine(settings, bring_up=fails).start(lambda phase: None, lambda why: None)


async def test_an_engine_whose_copies_do_not_end_hangs() -> None:
    trial = Trial()
    try:
        await trial.start()
        await trial.engine.look(lambda work: setattr(work, "copies", True))
        await until(lambda: trial.engine.status().load.stalled_s > 50.0)
    finally:
        await trial.engine.stop()
