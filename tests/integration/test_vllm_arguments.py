"""What each role's engine is told by the configuration; `integration` because importing vLLM takes seconds."""

from typing import Any

import pytest

from cluster_configs.schema import DecodeSection, ObjectivesSection, RachisConfig
from cluster_core.clock import ClusterClock
from cluster_core.errors import StartError
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


def test_an_engine_that_does_both_is_told_what_each_of_them_is() -> None:
    told = arguments(EngineRole.SHARED)

    both = arguments(EngineRole.PREFILL).additional_config | arguments(EngineRole.DECODE).additional_config
    assert told.additional_config == both
    assert told.additional_config["rachis_objectives"] == ObjectivesSection().model_dump()
    assert told.scheduler_cls == "shared_worker.engine_scheduler.SharedScheduler"
    assert told.kv_transfer_config.kv_role == "kv_both"


def test_an_engine_on_a_gpu_is_told_how_kv_and_weights_are_stored() -> None:
    pool = {"gpus_per_worker": 1}
    told = arguments(
        EngineRole.DECODE,
        pools={"prefill": pool, "decode": pool},
        engine={
            "device": "cuda", "kv_buffer_device": "cuda", "kv_cache_memory_gib": 1.5, "kv_cache_dtype": "fp8",
            "quantization": "fp8", "attention_backend": "FLASH_ATTN", "hf_overrides": '{"num_hidden_layers": 2}',
            "vllm": ("cpu_offload_gb=4", "enable_chunked_prefill=true", "load_format=dummy"),
        },
    )  # fmt: skip

    assert told.kv_cache_memory_bytes == int(1.5 * 2**30)
    assert (told.kv_cache_dtype, told.quantization, told.hf_overrides) == ("fp8", "fp8", {"num_hidden_layers": 2})
    assert "FLASH_ATTN" in str(told.attention_backend)
    assert (told.cpu_offload_gb, told.enable_chunked_prefill, told.load_format) == (4, True, "dummy")


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("cpu_offload_gbs=4", "vLLM has no argument `cpu_offload_gbs`, it has `cpu_offload_gb`"),
        ("zzz=1", "vLLM has no argument `zzz`$"),
        ("max_model_len=1", "`max_model_len` is not passed on"),
        ("speculative_config={}", "`speculative_config` is not passed on"),
    ],
)
def test_arguments_of_vllm_that_are_unknown_or_ours_are_refused_by_name(argument: str, sentence: str) -> None:
    with pytest.raises(StartError, match=f"engine.vllm: {sentence}"):
        arguments(EngineRole.PREFILL, engine={"vllm": (argument,)})


def test_other_engines_are_not_told() -> None:
    assert "rachis_decode" not in arguments(EngineRole.PREFILL).additional_config
    assert arguments(EngineRole.ALONE).additional_config == {}


def test_v2_of_vllms_model_runners_is_refused_where_there_is_no_triton() -> None:
    from vllm.triton_utils import HAS_TRITON

    from worker_runtime.vllm_start import bring_up_vllm

    if HAS_TRITON:
        pytest.skip("`make variants`")
    config = RachisConfig(engine={"model_runner": "v2"})
    settings = EngineSettings(config.model, config.engine, config.handoff, EngineRole.DECODE)
    with pytest.raises(StartError, match=r"^engine\.model_runner: v2 is written in Triton"):
        bring_up_vllm(settings, ClusterClock(), lambda phase: None, lambda call: None)
