"""What each role's engine is told by the configuration; `integration` because importing vLLM takes seconds."""

from typing import Any

import pytest

from cluster_configs.schema import DecodeSection, RachisConfig
from worker_runtime.engine_settings import EngineRole, EngineSettings

pytestmark = pytest.mark.integration


def arguments(role: EngineRole, **sections: Any) -> Any:
    from worker_runtime.vllm_arguments import engine_args

    config = RachisConfig(**sections)
    return engine_args(
        EngineSettings(config.model, config.engine, config.handoff, role, tiers=config.tiers, decode=config.decode)
    )


def test_a_decode_engine_is_told_how_to_form_its_batch() -> None:
    section = DecodeSection(policy="bandit", chunk_tokens=96)

    told = arguments(EngineRole.DECODE, decode=section)

    assert told.additional_config["rachis_decode"] == section.model_dump()
    assert told.additional_config["rachis_tiers"]["eviction"] == "rachis"
    assert told.scheduler_cls == "decode_worker.engine_scheduler.DecodeScheduler"


def test_other_engines_are_not_told() -> None:
    assert "rachis_decode" not in arguments(EngineRole.PREFILL).additional_config
    assert arguments(EngineRole.ALONE).additional_config == {}
