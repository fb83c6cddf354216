"""From our configuration to vLLM's engine arguments, and from a running engine to what the cluster knows of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import yaml
from vllm import EngineArgs
from vllm.config import KVEventsConfig, KVTransferConfig, StructuredOutputsConfig

from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import StartError
from kv_transfer import vllm_private
from kv_transfer.kv_layout import layout_of
from kv_transfer.model_features import missing_features
from worker_runtime.engine_settings import IMITATION_KEY, EngineRole, EngineSettings

STRUCTURED_OUTPUTS_BACKEND = "xgrammar"
# What hand-off, sessions and tiers are not made for, or have not been tried with.
_REFUSED = frozenset({
    "additional_config", "async_scheduling", "data_parallel_size", "decode_context_parallel_size", "enable_lora",
    "kv_cache_memory_bytes", "kv_events_config", "kv_offloading_size", "kv_transfer_config", "pipeline_parallel_size",
    "prefill_context_parallel_size", "revision", "scheduler_cls", "skip_tokenizer_init",
    "speculative_config", "tokenizer", "tokenizer_revision", "worker_cls", "worker_extension_cls",
})  # fmt: skip
_STREAMING_KEYS = ("policy", "preemption", "starvation_s", "cost_profile")
_KV_ROLES = {EngineRole.PREFILL: "kv_producer", EngineRole.DECODE: "kv_consumer", EngineRole.SHARED: "kv_both"}


def engine_args(settings: EngineSettings) -> EngineArgs:
    """Arguments of one engine. The plain engine gets nothing of ours."""
    engine = settings.engine
    arguments: dict[str, Any] = {
        "model": settings.model.resolved_path,
        "served_model_name": settings.model.served_name,
        "dtype": engine.dtype,
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size_tokens,
        "num_gpu_blocks_override": engine.kv_blocks,
        "max_num_seqs": engine.max_running_requests,
        "max_num_batched_tokens": engine.max_batched_tokens,
        "enforce_eager": engine.enforce_eager,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "quantization": engine.quantization,
        "tensor_parallel_size": engine.tensor_parallel_size,
        # Never Ray's: inside an actor vLLM would take it, and ask for the GPUs that the actor itself holds.
        "distributed_executor_backend": "mp" if engine.tensor_parallel_size > 1 else "uni",
        "seed": engine.seed,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        # Both engines of a request have to follow the same grammar: vLLM's `auto` takes another compiler for some.
        "structured_outputs_config": StructuredOutputsConfig(backend=STRUCTURED_OUTPUTS_BACKEND),
    }
    if engine.device == "cuda":
        arguments["gpu_memory_utilization"] = engine.gpu_memory_utilization
        if engine.kv_cache_memory_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(engine.kv_cache_memory_gib * 2**30)
    if engine.attention_backend is not None:
        arguments["attention_backend"] = engine.attention_backend
    if settings.tracing.otlp_url is not None:
        arguments["otlp_traces_endpoint"] = settings.tracing.otlp_url
    overrides = json.loads(engine.hf_overrides) if engine.hf_overrides else {}
    if engine.device == "imitated":
        # The length that is imitated, whatever the model whose tokenizer is taken was made for.
        overrides = {"max_position_embeddings": engine.max_model_len, **overrides}
        arguments |= {"worker_cls": "imitated_gpu.worker.ImitatedWorker", "additional_config": _imitation(settings)}
    if overrides:
        arguments["hf_overrides"] = overrides
    if settings.lora.max_loaded:
        # As many as the worker ever has: vLLM itself never drops one, nor reads one in the middle of a step.
        arguments |= {
            "enable_lora": True,
            "max_loras": settings.lora.places,
            "max_cpu_loras": settings.lora.max_loaded,
            "max_lora_rank": settings.lora.max_rank,
        }
    if settings.role is not EngineRole.ALONE:
        scheduler = _scheduler(settings)
        scheduler["additional_config"] |= arguments.get("additional_config", {})
        arguments |= scheduler
        arguments["kv_transfer_config"] = _kv_transfer_config(settings)
        # They are taken within the process: `kv_transfer.claims.block_events`.
        arguments["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if engine.device == "cpu":
            arguments["worker_cls"] = "worker_runtime.cpu_worker.RachisCPUWorker"
    return EngineArgs(**arguments, **_passed_on(engine.vllm, arguments))


def _passed_on(given: Sequence[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    """given: `name=value`, with values as in YAML. Raises StartError for a name that is not vLLM's, or that is ours."""
    known = {each.name for each in fields(EngineArgs)}
    passed = {}
    for argument in given:
        name, _, value = argument.partition("=")
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise StartError(
                f"vLLM has no argument `{name}`{f', it has `{near[0]}`' if near else ''}", field="engine.vllm"
            )
        if name in ours or name in _REFUSED:
            raise StartError(f"`{name}` is not passed on, Rachis sets it or needs vLLM's default", field="engine.vllm")
        passed[name] = yaml.safe_load(value)
    return passed


def engine_info(engine: Any, settings: EngineSettings) -> EngineInfo:
    config = engine.vllm_config
    block_size = config.cache_config.block_size
    return EngineInfo(
        model=settings.model.served_name,
        tokenizer=settings.model.path,
        vocabulary_size=config.model_config.get_vocab_size(),
        # A prompt that is longer than the pool would wait for ever.
        max_model_len=min(config.model_config.max_model_len, vllm_private.block_counts(engine)[1] * block_size),
        block_size_tokens=block_size,
        max_running_requests=config.scheduler_config.max_num_seqs,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        max_adapters=settings.lora.max_loaded,
        imitates=settings.engine.cost_model or "",
        missing_features=missing_features(layout_of(config, vllm_private.scheduler_of(engine).kv_cache_config)),
    )


def _imitation(settings: EngineSettings) -> dict[str, Any]:
    """Read by `imitated_gpu.settings`."""
    ports = str(settings.ports) if settings.ports is not None else None
    return {IMITATION_KEY: {"cost_model": settings.engine.cost_model, "host": settings.host, "ports": ports}}


def _scheduler(settings: EngineSettings) -> dict[str, Any]:
    # vLLM schedules asynchronously on a GPU, never on a CPU.
    kind = "Async" if settings.engine.device == "cuda" else ""
    tiers = {"rachis_tiers": settings.tiers.model_dump(exclude={"host_gib", "host_ratio"})}
    prefills = {"rachis_streaming": {key: getattr(settings.streaming, key) for key in _STREAMING_KEYS}}
    decodes = {"rachis_decode": settings.decode.model_dump(), "rachis_objectives": settings.objectives.model_dump()}
    scheduler, told = {
        EngineRole.PREFILL: (f"prefill_worker.engine_scheduler.{kind}StreamingScheduler", prefills),
        EngineRole.DECODE: (f"decode_worker.engine_scheduler.{kind}DecodeScheduler", decodes),
        EngineRole.SHARED: (f"shared_worker.engine_scheduler.{kind}SharedScheduler", prefills | decodes),
    }[settings.role]
    return {"scheduler_cls": scheduler, "additional_config": tiers | told}


def _kv_transfer_config(settings: EngineSettings) -> KVTransferConfig:
    is_imitated = settings.engine.device == "imitated"
    return KVTransferConfig(
        kv_connector="ImitatedNixlConnector" if is_imitated else "RachisNixlConnector",
        kv_connector_module_path="imitated_gpu.connector" if is_imitated else "kv_transfer.engine_connector",
        kv_role=_KV_ROLES[settings.role],
        kv_buffer_device=settings.engine.kv_buffer_device,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "kv_lease_duration": settings.handoff.lease_s,
            "backends": list(settings.engine.nixl_backends),
            # Imitated blocks have no content.
            "rachis_verify_share": 0.0 if is_imitated else settings.handoff.verify_share,
            # The path: vLLM may log what it is configured with.
            "rachis_secret_file": settings.secret_file,
            "rachis_host_bytes": _host_bytes(settings),
            "rachis_host_ratio": settings.tiers.host_ratio,
            # On a CPU the thread would take a core from the engine; see `kv_transfer.handoff.nixl_progress`.
            "rachis_progress_interval_us": 1000 if settings.engine.device == "cpu" else 0,
        },
    )


def _host_bytes(settings: EngineSettings) -> int:
    """Of one rank: each has its share of every block."""
    return int(settings.tiers.host_gib * 2**30) // settings.engine.tensor_parallel_size
