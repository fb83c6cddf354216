"""What one engine is started with: its sections of the configuration, its role, and where it listens."""

from dataclasses import dataclass, field
from enum import Enum

from cluster_configs.schema import (
    DecodeSection,
    EngineSection,
    HandoffSection,
    IndexSection,
    ModelSection,
    StreamingSection,
    TiersSection,
)
from cluster_core.ports import hold_port


class EngineRole(Enum):
    """PREFILL leases KV blocks, DECODE pulls them, ALONE is one plain engine without a connector."""

    PREFILL = "prefill"
    DECODE = "decode"
    ALONE = "alone"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """host: where the worker listens; empty takes the node's own address.

    service_id: whose names of prefixes the engine tells its chunks by; the worker's host fills it in.
    """

    model: ModelSection
    engine: EngineSection
    handoff: HandoffSection
    role: EngineRole
    streaming: StreamingSection = field(default_factory=StreamingSection)
    host: str = "127.0.0.1"
    tiers: TiersSection = field(default_factory=TiersSection)
    decode: DecodeSection = field(default_factory=DecodeSection)
    index: IndexSection = field(default_factory=IndexSection)
    service_id: str = ""


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment variables that vLLM, NIXL and UCX read; to be set before any of them is imported."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # Block events name blocks as its block pool does.
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "NIXL_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(settings.engine.threads),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(hold_port(settings.host)),
    }
    if settings.engine.enforce_eager:
        # vLLM decorates parts of its sampler with torch.compile even then; the first request with a penalty would
        # wait half a minute for a compiler.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if settings.engine.device == "cpu":
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(settings.engine.kv_cache_gib)))
    else:
        # The first-token replay is written for this model runner (docs/decisions/0004).
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if settings.host == "127.0.0.1":
        variables["UCX_NET_DEVICES"] = "lo"
    return variables
