"""What one engine is started with: its sections of the configuration, its role, and where it listens."""

from dataclasses import dataclass, field
from enum import Enum

from cluster_configs.schema import (
    DecodeSection,
    EngineSection,
    HandoffSection,
    IndexSection,
    LoraSection,
    ModelSection,
    ObjectivesSection,
    StreamingSection,
    TiersSection,
    TracingSection,
)
from cluster_core.errors import StartError
from cluster_core.ports import PortRange, free_ports, hold_port
from worker_runtime.addresses import LOOPBACK_INTERFACE, interfaces, ucx_devices

# In vLLM's additional configuration: what an imitated GPU is told.
IMITATION_KEY = "rachis_imitated"
# Ports that UCX listens on for each rank: one for NIXL's agent, one for each of the four threads that vLLM gives it.
_UCX_PORTS = 5
# Of the agent that stands for NIXL's.
_IMITATED_NIXL_PORTS = 1
# Of WorkerService and of vLLM's NIXL listener.
_OWN_PORTS = 2


class EngineRole(Enum):
    """PREFILL leases KV blocks, DECODE pulls them, SHARED does both; ALONE is one plain engine without a connector."""

    PREFILL = "prefill"
    DECODE = "decode"
    SHARED = "shared"
    ALONE = "alone"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one engine is started with."""

    model: ModelSection
    engine: EngineSection
    handoff: HandoffSection
    role: EngineRole
    streaming: StreamingSection = field(default_factory=StreamingSection)
    # Where the worker listens and where others find it; empty takes the host's address in `network`, or the one that
    # Ray knows the node by.
    host: str = "127.0.0.1"
    tiers: TiersSection = field(default_factory=TiersSection)
    decode: DecodeSection = field(default_factory=DecodeSection)
    index: IndexSection = field(default_factory=IndexSection)
    lora: LoraSection = field(default_factory=LoraSection)
    # Names of prefixes begin with it; the worker's host fills it in.
    service_id: str = ""
    network: str | None = None
    # That it listens on; None takes free ones.
    ports: PortRange | None = None
    # Of the service's secret, on the worker's host.
    secret_file: str | None = None
    objectives: ObjectivesSection = field(default_factory=ObjectivesSection)
    # Where vLLM's own spans go.
    tracing: TracingSection = field(default_factory=TracingSection)


def ports_needed(engine: EngineSection) -> int:
    """Ports that one worker listens on for others."""
    if engine.device == "imitated":
        return _OWN_PORTS + _IMITATED_NIXL_PORTS
    return _OWN_PORTS + _UCX_PORTS * engine.tensor_parallel_size


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment variables that vLLM, NIXL and UCX read; to be set before any of them is imported.

    Raises StartError where the host has no port left for them.
    """
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
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(hold_port(settings.host, settings.ports, "pools.ports")),
        # vLLM's process groups, all of one host: nobody else has to reach them.
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }
    if settings.role is not EngineRole.ALONE:
        # Another layout of layers with a state ends the start before our own sentence does.
        variables["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
    if settings.engine.enforce_eager:
        # vLLM decorates parts of its sampler with torch.compile even then; the first request with a penalty would
        # wait half a minute for a compiler.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    # On a GPU the other one has not been run yet (docs/decisions/0080).
    runner = settings.engine.model_runner or ("v1" if settings.engine.device == "cuda" else None)
    if runner is not None:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    if settings.engine.device != "cuda":
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if settings.engine.device == "cpu":
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(settings.engine.kv_cache_gib)))
    if settings.engine.device == "cuda":
        # It is compiled at the start, by a compiler that a host with the driver alone has not.
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if settings.tracing.otlp_url is not None:
        variables |= _exporter_environment(settings.tracing)
    return variables if settings.engine.device == "imitated" else variables | _ucx_environment(settings)


def _exporter_environment(tracing: TracingSection) -> dict[str, str]:
    """Of the exporter that vLLM makes for its own spans."""
    return {
        "OTEL_SERVICE_NAME": "rachis",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc" if tracing.otlp_protocol == "grpc" else "http/protobuf",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": str(tracing.timeout_s),
    }


def _ucx_environment(settings: EngineSettings) -> dict[str, str]:
    """What the node's own environment says of UCX wins: see `worker_runtime.host`."""
    variables = {}
    devices = ucx_devices(settings.host, interfaces())
    if devices is not None:
        variables["UCX_NET_DEVICES"] = devices
    if settings.ports is not None:
        wanted = ports_needed(settings.engine) - _OWN_PORTS
        free = free_ports(settings.host, settings.ports, wanted)
        # UCX itself would look for one for ever.
        if free < wanted:
            raise StartError(
                f"only {free} ports of {settings.ports} are free on {settings.host}, UCX needs {wanted}: give each "
                f"worker of a node {ports_needed(settings.engine)}",
                field="pools.ports",
            )
        variables["UCX_TCP_PORT_RANGE"] = str(settings.ports)
    return variables
