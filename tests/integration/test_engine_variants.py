"""What `make variants` says of an engine is so: otherwise the tests would pass on another one."""

import os

import pytest

from tests.contract.conftest import vllm_engine
from worker_runtime.engine_settings import EngineRole

VARIANT = os.environ.get("TESTS_VARIANT")
pytestmark = [pytest.mark.integration, pytest.mark.skipif(not VARIANT, reason="for `make variants`")]


async def test_an_engine_is_the_variant_that_is_asked_for() -> None:
    engine = vllm_engine(EngineRole.DECODE)
    try:
        await engine.start(lambda phase: None, lambda why: None)
        config = await engine.look(lambda work: work.engine.vllm_config)
    finally:
        await engine.stop()
    is_v2, is_async = str(VARIANT).startswith("v2"), str(VARIANT).endswith("async")
    scheduler = config.scheduler_config
    assert (config.use_v2_model_runner, scheduler.async_scheduling) == (is_v2, is_async)
    assert scheduler.scheduler_cls == f"decode_worker.engine_scheduler.{'Async' if is_async else ''}DecodeScheduler"
