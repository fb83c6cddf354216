"""The configuration schema. Frozen, unknown keys refused; each part of the service receives its own section.

Units stand last in the names. Defaults are those of one machine without a GPU; the profiles in `profiles/` say
what differs.
"""

import ipaddress
import json
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster_core.event_log import LogRules
from cluster_core.objectives import ObjectivesByClass, objectives_by_class
from kv_transfer.handoff.rules import MAX_DEADLINE_SHARE

BUILTIN_MODEL = "builtin"
# What the names of models that nothing computes begin with.
IMITATED_NAME = "imitated-"

Port = Annotated[int, Field(ge=0, le=65_535)]
# An address of IPv6 may have the brackets that it needs before a port.
Host = Annotated[str, AfterValidator(lambda host: host.strip("[]"))]
# Also of `router.request_timeout_s`: no service lets a request take longer.
MOST_SECONDS = 86_400
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]

ADAPTER_NAME = re.compile(r"[A-Za-z0-9._/-]{1,64}")
ADAPTER_NAME_RULE = "a name has 1 to 64 letters, digits, dots, dashes, underscores or slashes"


class Section(BaseModel):
    # Of YAML `.inf` and `.nan` are numbers: nothing here can be so large, or none at all.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ServiceSection(Section):
    """Which service this is."""

    name: str = Field(
        "",
        pattern=r"^[a-z0-9-]{0,40}$",
        description="Lower-case letters, digits, dashes; empty takes a new one. Two services on one Redis need two.",
    )
    orphan_s: float = Field(
        3600.0,
        ge=0,
        le=604_800,
        description="Under a name and ray.address: how long workers stay without `rachis serve` and anything to do. "
        "0: they end with it.",
    )
    leave_workers: bool = Field(
        False, description="`rachis serve` that is stopped leaves its workers to the next one, as one that is killed."
    )


class BestEffortObjectives(Section):
    """Of requests of a priority above 0."""

    ttft_s: Seconds | None = Field(None, description="null: objectives.ttft_s.")
    tpot_s: float | None = Field(
        None,
        ge=0,
        le=86_400,
        description="null: objectives.tpot_s. 0: none, and no bound where only they decode.",
    )


class ObjectivesSection(Section):
    """What the service is meant to keep; alerts and autoscaling go by it."""

    ttft_s: Seconds = Field(5.0, description="Time to first token of 90% of all requests.")
    tpot_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="Time per output token after the first, of 90% of all requests. Beside running decodes a step "
        "computes no more of prompts than this leaves, unless ttft_s would be missed. 0: none, and no bound.",
    )

    best_effort: BestEffortObjectives = Field(default_factory=BestEffortObjectives)

    @model_validator(mode="after")
    def _best_effort_is_no_stricter(self) -> "ObjectivesSection":
        given = self.best_effort
        if given.ttft_s is not None and given.ttft_s < self.ttft_s:
            raise ValueError(
                "objectives.best_effort.ttft_s: must be at least objectives.ttft_s, "
                f"{self.ttft_s:g}, got {given.ttft_s:g}"
            )
        if given.tpot_s and not 0 < self.tpot_s <= given.tpot_s:
            raise ValueError(
                "objectives.best_effort.tpot_s: must be 0 or at least objectives.tpot_s, which must be set, "
                f"{self.tpot_s:g}, got {given.tpot_s:g}"
            )
        return self

    @property
    def by_class(self) -> ObjectivesByClass:
        return objectives_by_class(self.model_dump())

    @property
    def for_engines(self) -> "ObjectivesSection":
        """Without a bound engines go by none of it: another one is no reason to end an engine."""
        return self if self.tpot_s else ObjectivesSection()


class ModelSection(Section):
    """Which model is served."""

    path: str = Field(BUILTIN_MODEL, min_length=1, description="`builtin`, a Hugging Face id, or a folder.")
    name: str = Field("", description="Name that clients use; empty takes it from the path.")

    @property
    def served_name(self) -> str:
        return self.name or ("rachis-builtin" if self.path == BUILTIN_MODEL else self.path)

    @property
    def resolved_path(self) -> str:
        """What engines and tokenizers load from, on the host that asks."""
        if self.path == BUILTIN_MODEL:
            return str(resources.files("builtin_model") / "weights")
        return str(Path(self.path).expanduser()) if self.path.startswith("~") else self.path


class EngineSection(Section):
    """The vLLM engine of every worker."""

    device: Literal["cpu", "cuda", "imitated"] = Field(
        "cpu", description="imitated: a GPU that computes nothing and takes the time of `cost_model`; docs/imitated.md."
    )
    cost_model: str | None = Field(
        None, min_length=1, description="Of an imitated GPU: a name in cluster_sim/cost_models, or a file."
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    block_size_tokens: int = Field(32, ge=1, le=512, description="On a CPU: multiples of 32 only.")
    max_model_len: int = Field(4096, ge=32, description="Most tokens of prompt and completion together.")
    kv_cache_gib: float = Field(1.0, gt=0, description="CPU only: memory set aside for KV blocks of one worker.")
    kv_blocks: int | None = Field(1024, ge=8, description="Blocks per worker; null lets vLLM fill its memory.")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="GPU only: share of a GPU for one worker.")
    kv_cache_memory_gib: float | None = Field(
        None, gt=0, description="GPU only: memory for KV blocks of one GPU, whatever gpu_memory_utilization says."
    )
    kv_cache_dtype: str = Field("auto", min_length=1, description="How KV is stored, such as fp8; auto: as dtype.")
    quantization: str | None = Field(None, min_length=1, description="Of the weights; null: as the model says.")
    attention_backend: str | None = Field(None, min_length=1, description="vLLM's name of one; null: vLLM chooses.")
    hf_overrides: str = Field("", description="JSON object of values in place of those in the model's config.json.")
    vllm: tuple[str, ...] = Field(
        (), description="Further arguments of vLLM's engine, `name=value`; those that Rachis sets itself are refused."
    )
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    max_running_requests: int = Field(64, ge=1, le=4096)
    max_batched_tokens: int = Field(2048, ge=32, description="Most tokens of one engine step.")
    model_runner: Literal["v1", "v2"] | None = Field(
        None, description="vLLM's; null: v1 on a GPU, on a CPU v2 where there is Triton for it. v2 needs Triton."
    )
    enforce_eager: bool = Field(
        True, description="False compiles and captures CUDA graphs: slower start, faster steps."
    )
    threads: int = Field(1, ge=1, le=256, description="OpenMP threads of one worker.")
    own_process: bool = Field(
        False, description="Steps run in a process beside the one that serves, and never wait for its interpreter lock."
    )
    seed: int = Field(0, ge=0)
    nixl_backends: tuple[str, ...] = ("UCX",)
    kv_buffer_device: Literal["cpu", "cuda"] = "cpu"

    @field_validator("hf_overrides")
    @classmethod
    def _is_an_object(cls, text: str) -> str:
        try:
            if text and not isinstance(json.loads(text), dict):
                raise ValueError
        except ValueError:
            raise ValueError("must be a JSON object") from None
        return text

    @field_validator("vllm")
    @classmethod
    def _are_named(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        names = [argument.partition("=")[0] for argument in arguments]
        for name, argument in zip(names, arguments, strict=True):
            if not name.isidentifier() or "=" not in argument:
                raise ValueError(f"`{argument}` is not name=value")
            try:
                yaml.safe_load(argument.partition("=")[2])
            except yaml.YAMLError:
                raise ValueError(f"the value of `{name}` is not YAML") from None
        if len(set(names)) < len(names):
            raise ValueError("names an argument twice")
        return arguments

    @model_validator(mode="after")
    def _fits_the_device(self) -> "EngineSection":
        if self.device != "cuda" and self.block_size_tokens % 32:
            raise ValueError("block_size_tokens must be a multiple of 32 on a CPU")
        if self.device == "cpu" and self.kv_cache_memory_gib is not None:
            raise ValueError("kv_cache_memory_gib is for GPUs, a CPU has kv_cache_gib")
        buffer = "cuda" if self.device == "cuda" else "cpu"
        if self.kv_buffer_device != buffer:
            # vLLM copies prompts alone into a buffer on the host, and leaves out an answer that goes on behind one.
            raise ValueError(f"kv_buffer_device must be {buffer} where device is {self.device}")
        return self

    @model_validator(mode="after")
    def _imitates_a_cost_model(self) -> "EngineSection":
        if (self.device == "imitated") != (self.cost_model is not None):
            raise ValueError("cost_model is given where device is imitated, and nowhere else")
        if self.device != "imitated":
            return self
        if self.model_runner is not None:
            raise ValueError("model_runner is of a device that computes, an imitated one has none")
        if self.tensor_parallel_size != 1:
            raise ValueError(
                "tensor_parallel_size must be 1 where device is imitated: the cost model says how many GPUs"
            )
        if self.kv_cache_memory_gib is not None:
            raise ValueError(
                "kv_cache_memory_gib is for GPUs, an imitated one has kv_blocks or its cost model's memory"
            )
        return self


class AutoscaleSection(Section):
    """When a pool grows and shrinks by itself; see docs/deploy.md."""

    enabled: bool = False
    min_workers: int = Field(1, ge=1, le=1024)
    max_workers: int = Field(8, ge=1, le=1024)
    waiting_per_worker: float = Field(
        4.0, gt=0, le=10_000, description="Waiting requests of a worker that are too many."
    )
    grow_after_s: Seconds = Field(
        15.0, description="How long they are too many, or the TTFT too long, before it grows."
    )
    shrink_below: float = Field(
        0.3, gt=0, lt=1, description="Share of its places in the batch that a pool may use with a worker less."
    )
    shrink_after_s: Seconds = Field(300.0, description="How long it would before it shrinks.")

    @model_validator(mode="after")
    def _in_order(self) -> "AutoscaleSection":
        if self.max_workers < self.min_workers:
            raise ValueError("max_workers must be at least min_workers")
        return self


class PoolSection(Section):
    """One pool of workers, each a Ray actor."""

    workers: int = Field(1, ge=0, le=1024)
    min_ready: int | None = Field(
        None, ge=1, le=1024, description="Workers that have to be ready for the service to be up; null: all of them."
    )
    cpus_per_worker: float = Field(0.5, ge=0)
    gpus_per_worker: float = Field(0.0, ge=0)
    node_resource: str | None = Field(
        None,
        min_length=1,
        description="Custom resource of Ray of which each worker takes 1: the nodes that have it are the pool's.",
    )
    placement_strategy: Literal["PACK", "SPREAD"] = "PACK"
    max_restarts: int = Field(-1, ge=-1, description="Restarts of a dead worker; -1 is without end.")
    autoscale: AutoscaleSection = AutoscaleSection()

    @model_validator(mode="after")
    def _can_get_ready(self) -> "PoolSection":
        if self.min_ready is not None and self.min_ready > self.workers:
            raise ValueError(f"min_ready must be at most the {self.workers} of workers")
        return self

    @property
    def minimum(self) -> int:
        """Workers below which the pool is short."""
        return self.workers if self.min_ready is None else self.min_ready


class SharedPoolSection(PoolSection):
    """Workers that prefill and decode. A service that has them has no others; see docs/shared-workers.md."""

    workers: int = Field(0, ge=0, le=1024, description="Above 0 only where prefill and decode have none.")


class PoolsSection(Section):
    network: str | None = Field(
        None,
        description="Network, such as 10.0.0.0/16, of which workers take their host's address; null: loopback, or the "
        "address that Ray knows the node by under ray.address.",
    )
    ports: str | None = Field(
        None,
        pattern=r"^\d{1,5}-\d{1,5}$",
        description="First and last port that workers listen on, such as 20000-20999; null takes free ones.",
    )
    prefill: PoolSection = PoolSection()
    decode: PoolSection = PoolSection()
    shared: SharedPoolSection = SharedPoolSection()

    @property
    def in_use(self) -> dict[str, PoolSection]:
        """By name: the pools of this service, whose workers do both or one of the two each."""
        return {"shared": self.shared} if self.shared.workers else {"prefill": self.prefill, "decode": self.decode}

    @model_validator(mode="after")
    def _serves(self) -> "PoolsSection":
        if self.shared.workers and (self.prefill.workers or self.decode.workers):
            raise ValueError(
                f"shared.workers is {self.shared.workers}, so prefill.workers and decode.workers must be 0, got "
                f"{self.prefill.workers} and {self.decode.workers}: workers that do both have no others beside them"
            )
        if not self.shared.workers and self.decode.workers < 1:
            raise ValueError("decode.workers must be at least 1, without a decode worker nothing is served")
        return self

    @field_validator("network")
    @classmethod
    def _is_a_network(cls, network: str | None) -> str | None:
        if network is not None:
            ipaddress.ip_network(network)
        return network

    @field_validator("ports")
    @classmethod
    def _is_a_range(cls, ports: str | None) -> str | None:
        if ports is not None:
            first, last = map(int, ports.split("-"))
            if not 1024 <= first <= last <= 65_535:
                raise ValueError("ports must be a range within 1024-65535, the lower one first")
        return ports


class LoraSection(Section):
    """LoRA adapters, which requests name as their model; see docs/adapters.md."""

    max_loaded: int = Field(
        0, ge=0, le=4096, description="Adapters that the service has, all in the memory of each worker; 0: none."
    )
    max_in_batch: int = Field(4, ge=1, le=256, description="Different adapters that one engine step computes at most.")
    max_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = Field(16, description="Of an adapter's matrices.")
    adapters: tuple[str, ...] = Field(
        (), description="NAME=FOLDER each, of folders that every worker's host has; loaded when the service starts."
    )

    @property
    def folders(self) -> dict[str, str]:
        """By name."""
        return dict(each.split("=", 1) for each in self.adapters)

    @property
    def places(self) -> int:
        """Adapters of one engine step."""
        return min(self.max_in_batch, self.max_loaded)

    @model_validator(mode="after")
    def _names_adapters(self) -> "LoraSection":
        for each in self.adapters:
            name, _, folder = each.partition("=")
            if not ADAPTER_NAME.fullmatch(name) or not folder:
                raise ValueError(f"adapters has `{each}`, which is no NAME=FOLDER; {ADAPTER_NAME_RULE}")
        if len(self.folders) < len(self.adapters):
            raise ValueError("adapters has a name twice")
        if len(self.adapters) > self.max_loaded:
            raise ValueError(f"adapters has {len(self.adapters)} entries, max_loaded is {self.max_loaded}")
        return self


class HandoffSection(Section):
    """Leases on KV blocks between the pools."""

    lease_s: int = Field(30, ge=6, le=3600, description="How long a prefill worker keeps blocks that wait for a pull.")
    deadline_s: float = Field(15.0, gt=0, description="A pull that has not ended by then is recomputed.")
    verify_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of hand-offs whose pulled blocks are compared with the sender's, by checksums.",
    )

    @model_validator(mode="after")
    def _deadline_before_lease(self) -> "HandoffSection":
        limit = self.lease_s * MAX_DEADLINE_SHARE
        if self.deadline_s > limit:
            raise ValueError(f"deadline_s must be at most {limit:g}, half of lease_s: a pull after the lease is wrong")
        return self


class RouterSection(Section):
    host: Host = Field("127.0.0.1", min_length=1, description="Where prompts and sessions are answered.")
    port: Port = Field(7421, description="0 takes a free one.")
    share_port: bool = Field(
        False,
        description="Whether other routers of this service on this host may listen on `port` as well: as those of "
        "`rachis route --processes` do. Administration has to be apart.",
    )
    admin_host: Host = Field("127.0.0.1", min_length=1, description="Where the admin API is answered.")
    admin_port: Port | None = Field(
        None,
        description="0 takes a free one; null: 7422, and `port` while host and admin_host are loopback both.",
    )
    metrics_host: Host | None = Field(
        None, min_length=1, description="Of metrics, probes and the console; null: that of prompts and sessions."
    )
    metrics_port: Port = Field(0, description="Of http://host:port/metrics, for Prometheus; 0 takes a free one.")
    max_in_flight_requests: int = Field(256, ge=1, le=100_000)
    max_queued_requests: int = Field(256, ge=0, le=100_000, description="Above this: RESOURCE_EXHAUSTED.")
    tenant_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Of max_in_flight_requests and max_prompt_mib, that one tenant may have; see docs/access.md.",
    )
    best_effort_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Of max_in_flight_requests and max_prompt_mib, that priorities above 0 may have in all.",
    )
    queue_timeout_s: Seconds = 30.0
    request_timeout_s: Seconds = Field(600.0, description="Longest a request may take, whatever deadline it brings.")
    send_timeout_s: Seconds = Field(
        30.0, description="How long a client may take nothing of its answer before its request is ended."
    )
    max_message_mib: int = Field(4, ge=1, le=1024)
    max_prompt_mib: int = Field(
        1024, ge=1, le=1 << 20, description="Memory for the prompts of all requests and sessions; 48 bytes a token."
    )
    grammar_timeout_s: Seconds = Field(10.0, description="Longest that compiling a grammar may take.")
    grammar_memory_mib: int = Field(1024, ge=64, le=65_536, description="Most memory that compiling a grammar takes.")
    prefill_attempts: int = Field(2, ge=1, le=10, description="Workers tried before a prefill is given up.")
    max_migrations: int = Field(
        16,
        ge=0,
        le=1000,
        description="How often an answer that has begun may go on at another decode worker; 0: it ends with its own, "
        "and a drain waits for it.",
    )
    drain_timeout_s: Seconds = Field(10.0, description="How long running requests may finish when the service stops.")

    @model_validator(mode="after")
    def _what_shares_a_port_has_one_of_its_own(self) -> "RouterSection":
        if self.share_port and (self.port == 0 or self.admin_port is None):
            raise ValueError("share_port needs a port, and an admin_port that is each router's own")
        return self


class WebSocketSection(Section):
    """`/v1/responses` as a WebSocket; the limits are those of one gateway process and of each of its connections."""

    max_connections: int = Field(1024, ge=1, le=100_000, description="One more is answered with 429.")
    max_frame_mib: float = Field(
        16.0,
        gt=0,
        le=256,
        description="Of one event of a client, of a conversation that it goes on with, and of a body over HTTP.",
    )
    max_responses: int = Field(64, ge=1, le=10_000, description="Kept by a connection to go on from; the oldest go.")
    max_kept_mib: float = Field(16.0, gt=0, le=1024, description="Of these, as JSON; the latest is kept in any case.")
    idle_timeout_s: Seconds = Field(600.0, description="A connection without an event for so long is ended.")
    lifetime_s: Seconds = Field(3600.0, description="A connection is ended then, whatever it does.")


class StoredResponsesSection(Section):
    """Responses that gateways keep in Redis, to be gone on from by their id at any of them; for the whole service."""

    lifetime_s: float = Field(2_592_000.0, gt=0, le=31_536_000, description="Of each, from its end.")
    max_responses: int = Field(10_000, ge=1, le=10_000_000, description="The oldest go.")
    max_total_mib: float = Field(256.0, gt=0, le=1_048_576, description="Of all of them; the oldest go.")
    max_response_mib: float = Field(4.0, gt=0, le=64, description="A larger one is answered, and not stored.")


class GatewaySection(Section):
    """The HTTP APIs of OpenAI and Anthropic, which `rachis serve` starts beside its router."""

    host: Host = "127.0.0.1"
    port: Port | None = Field(8000, description="0 takes a free one; null: no gateway is started.")
    processes: int = Field(1, ge=1, le=64, description="They share the port.")
    options: tuple[str, ...] = Field(
        (), description="Of vLLM's front, such as --enable-auto-tool-choice; docs/http.md lists them."
    )
    websocket: WebSocketSection = WebSocketSection()
    stored_responses: StoredResponsesSection = StoredResponsesSection()


class StreamingSection(Section):
    """Sessions whose prompt arrives while it is prefilled."""

    policy: Literal["default", "default_vllm", "fcfs", "mcps", "lcas"] = Field(
        "default", description="Which session is computed first; see docs/glossary.md."
    )
    preemption: Literal["recompute", "swap", "cost"] = Field(
        "cost", description="What happens to the blocks of a preempted session; `cost` takes the cheaper of the two."
    )
    cost_profile: str | None = Field(
        None,
        min_length=1,
        description="Absolute path of a file written by `rachis profile`; null takes rough figures for the device.",
    )
    starvation_s: Seconds = Field(
        5.0,
        description="Nobody is admitted before who waited so long and does not fit; `lcas` puts them first, and"
        " `default` holds none of them back.",
    )
    max_backlog_tokens: int = Field(
        131_072, ge=1, description="Tokens that wait to be computed before a session's client is slowed."
    )
    max_unapplied_inputs: int = Field(256, ge=1, le=100_000, description="Inputs on their way to the engine, likewise.")
    idle_timeout_s: Seconds = Field(120.0, description="A session without input for so long is ended.")
    open_timeout_s: Seconds = Field(10.0, description="How long a call may take to send `open`.")
    max_open_sessions: int = Field(4096, ge=1, le=1_000_000, description="Of one router, whether they work or wait.")
    max_client_sessions: int = Field(1024, ge=1, le=1_000_000, description="Of these, from one address.")
    progress_interval_ms: int = Field(50, ge=0, le=60_000, description="Least time between two progress events.")


class TiersSection(Section):
    """Which cached prefixes a worker keeps, on the device and in host memory."""

    eviction: Literal["lru", "lfu", "fifo", "2q", "hotprefix", "rachis"] = Field(
        "rachis", description="Which cached prefix leaves the device first; see docs/tiers.md."
    )
    formula: str = Field(
        "frequency + clock / length",
        description="Priority of eviction `hotprefix`: `x op y op z` over clock, frequency and length.",
    )
    host_gib: float = Field(
        0.25, ge=0, le=4096, description="Host memory of one worker for cached prefixes and swapped sessions; 0: none."
    )
    host_ratio: float | None = Field(
        None, ge=0, le=1000, description="Host memory as a multiple of the device's KV memory, instead of `host_gib`."
    )
    admission: Literal["none", "everything", "selective"] = Field(
        "selective", description="Which cached prefixes are copied to host memory."
    )
    frequency_threshold: int = Field(2, ge=1, le=255, description="Accesses before `selective` copies a block.")
    copy_blocks: int = Field(
        64, ge=1, le=100_000, description="Blocks on their way to host memory at most: the bound on bandwidth."
    )
    tenant_turnovers: int = Field(
        4,
        ge=0,
        le=1_000_000,
        description="How often a tier is filled anew before a tenant that asks for nothing loses the share of it that "
        "is kept for it; 0: none is kept for any.",
    )
    promotion: bool = Field(True, description="Bring hot prefixes back to the device before they are asked for.")
    promotion_blocks: int = Field(64, ge=1, le=100_000, description="Blocks that are brought back at once at most.")
    promotion_pause: int = Field(
        1024, ge=0, le=1_000_000, description="While promotions are in vain, one in so many prefills at most is tried."
    )
    lifetime_requests: int = Field(
        500,
        ge=1,
        le=10_000_000,
        description="Requests without an access in which a block of `rachis` counts half, until it has measured how "
        "long blocks rest between two accesses.",
    )
    novelty_weight: float = Field(
        0.33, ge=0, le=10, description="What `rachis` takes off for each doubling of the blocks new to the prompt."
    )
    filter_entries: int = Field(
        1 << 20,
        ge=1024,
        le=1 << 28,
        description="Blocks whose hotness is remembered, resident or not; 16 to 33 bytes each.",
    )
    half_life_requests: int | None = Field(
        2000,
        ge=1,
        le=10_000_000,
        description="Requests without an access in which a remembered frequency halves; null: never.",
    )
    max_age_epochs: int = Field(1024, ge=1, le=1 << 30, description="Clock of a block right after an access.")
    requests_per_epoch: int = Field(4, ge=1, le=1_000_000, description="Requests after which all clocks fall by one.")

    @field_validator("formula")
    @classmethod
    def _is_a_formula(cls, text: str) -> str:
        # Imported here because it takes a while, and hardly anybody sets one.
        from kv_transfer.tiers.hotness import Formula

        return Formula(text).text


class DecodeSection(Section):
    """Which waiting requests a decode worker decodes together."""

    policy: Literal["fcfs", "greedy", "heuristic", "bandit", "q_learning"] = Field(
        "heuristic",
        description="What decides who joins the batch and when it stays as it is; `fcfs` is vLLM's order of arrival.",
    )
    chunk_tokens: int = Field(
        64, ge=1, le=65_536, description="Step in which prefixes are compared; rounded up to whole blocks."
    )
    wait_bound_s: Seconds = Field(
        2.0,
        description="Longest a request is held by the policy; half of what its deadline leaves where that is less.",
    )
    order_rows: bool = Field(
        True, description="CPU and V1 only: keep requests that share a prefix side by side, whatever the policy."
    )
    guard: bool = Field(True, description="Measure against order of arrival, and fall back to it when it is faster.")
    probe_interval_s: Seconds = Field(30.0, description="Time between two measurements; more while the policy wins.")
    probe_s: Seconds = Field(1.0, description="How long each of the two is measured.")
    fallback_s: Seconds = Field(
        60.0, description="How long order of arrival stays in force when it is faster; longer each time in a row."
    )
    policy_folder: str | None = Field(
        None, min_length=1, description="Where each worker keeps what its policy learned; null: nowhere."
    )
    save_interval_s: Seconds = Field(60.0, description="How often it is saved.")


class IndexSection(Section):
    """The global prefix-hotness index: which worker holds which prefix, and how hot it is."""

    chunk_tokens: int = Field(
        128, ge=1, le=65_536, description="Step in which prefixes are known; rounded up to whole blocks."
    )
    max_entries: int = Field(
        1 << 20,
        ge=1024,
        le=1 << 31,
        description="Chunks that a router remembers at most, 16 to 32 bytes each; the coldest are dropped first.",
    )
    half_life_s: Seconds = Field(600.0, description="Time in which the hotness of a prefix halves.")
    write_interval_s: Seconds = Field(0.02, description="Least time between two batches that a worker writes.")
    refresh_s: Seconds = Field(
        0.05,
        description="How often routers read what workers have written; a tenth as often while nobody asks anything.",
    )
    snapshot_keys: int = Field(
        100_000, ge=1, description="Keys in batches after which a worker writes a snapshot: the bound on recovery."
    )
    max_staleness_s: Seconds = Field(
        10.0, description="When Redis has not answered for so long, placement uses load alone and an alarm is raised."
    )
    silent_after_s: Seconds = Field(
        60.0, description="A worker that finishes requests for so long without telling of a block raises an alarm."
    )


Weight = Annotated[float, Field(ge=0, le=1000)]


class PrefillWeights(Section):
    """What the terms of policy `hotness` weigh on the prefill pool; 0 leaves one out."""

    ttft: Weight = Field(1.0, description="Expected time to the first token.")


class DecodeWeights(Section):
    """The same on the decode pool."""

    affinity: Weight = Field(2.0, description="What of the prompt is shared with what runs and waits there.")
    pull: Weight = Field(0.5, description="KV that does not have to be pulled.")
    room: Weight = Field(2.0, description="Free places in the batch.")
    memory: Weight = Field(1.0, description="KV memory left.")
    adapter: Weight = Field(1.0, description="The request's LoRA adapter is loaded.")


class ByObjectives(Section):
    """Of policy `objectives`."""

    prefill_heavy: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the workers that are to decode little, rounded down; null: as many as what is asked for "
        "needs, by a slow loop.",
    )
    refuses: bool = Field(
        True,
        description="Refuse requests whose first token no worker is expected to have in time, or with which all would "
        "miss TPOT, before they wait.",
    )


class PlacementSection(Section):
    """Which worker a request goes to."""

    policy: Literal[
        "default", "hotness", "objectives", "random", "round_robin", "least_loaded", "prefix_only", "cost_formula",
        "lmetric",
    ] = Field(
        "default",
        description="`default`: `objectives` where workers do both and objectives.tpot_s is set "
        "(docs/shared-workers.md), `hotness` elsewhere (docs/placement.md). Those after these two are there to be "
        "compared with.",
    )  # fmt: skip
    by_objectives: ByObjectives = ByObjectives()
    prefill_weights: PrefillWeights = PrefillWeights()
    decode_weights: DecodeWeights = DecodeWeights()
    long_prompts_apart: bool = Field(
        True, description="Let the prompts that bring the most work keep to one half of the prefill pool, at a price."
    )
    prediction_s: Seconds = Field(
        5.0, description="How long a prefix counts as held by the worker it was sent to, before its blocks are told."
    )
    seed: int = Field(0, ge=0, description="Of the choice between equals.")
    disaggregation: Literal["conditional", "always"] = Field(
        "conditional", description="Whether a decode worker prefills what it is measured to do sooner by itself."
    )
    local_prefill_tokens: int = Field(
        512, ge=0, le=1_000_000, description="Most tokens that a decode worker prefills while the prefill pool is up."
    )
    replication: bool = Field(True, description="Copy prefixes that are too hot for the workers that hold them.")
    replication_load: float = Field(
        0.5, gt=0, le=1, description="Share of a holder's time that one prefix may ask for before it is copied."
    )
    replicas: int = Field(4, ge=1, le=1024, description="Workers at most that a prefix is copied to.")
    recent_prompts_mib: int = Field(
        64, ge=0, le=1 << 16, description="Memory for prompts of late, from which hot prefixes are copied."
    )
    explanations_mib: int = Field(16, ge=0, le=1 << 16, description="Memory for the reasons of decisions of late.")


class RedisSection(Section):
    url: str | None = Field(
        None,
        pattern=r"^((rediss?(\+cluster)?|unix)://|rediss?\+sentinel://([^@/]*@)?[^@/,]+(,[^@/,]+)*/[^/]+(/\d+)?$)",
        description="null starts the embedded server with the service; `redis+cluster://`: a node of a Redis Cluster; "
        "`redis+sentinel://:password@host:26379,host:26379/name/0`: the primary that sentinels call so.",
    )

    host: Host | None = Field(
        None,
        description="Where the embedded server listens; null: loopback, or the node's own address under ray.address.",
    )
    port: Port = Field(0, description="Of the embedded server; 0 takes a free one.")
    worker_lease_s: Seconds = Field(
        5.0, description="A worker that does not renew its registration for so long is gone."
    )
    refresh_s: Seconds = Field(0.25, description="How often routers read the registrations.")
    share_loads_s: Seconds = Field(
        0.02, description="How often routers tell each other what they have on each worker, where there are several."
    )


# What of it a gateway is told.
GATEWAY_SECURITY = (
    "secret_file", "certificate_file", "certificate_key_file", "client_ca_file", "ca_file", "server_name", "open",
)  # fmt: skip


class SecuritySection(Section):
    """Who may do what, and whose cached prefixes are whose; see docs/access.md."""

    keys_file: str | None = Field(
        None, min_length=1, description="API keys, as `rachis keys` writes them; null: everybody may do everything."
    )
    secret_file: str | None = Field(
        None,
        min_length=1,
        description="The service's secret, as `rachis keys secret` writes it: the same at every router and gateway.",
    )
    jwt_jwks_file: str | None = Field(
        None, min_length=1, description="Public keys (JWKS) of an issuer of tokens (JWT) that are taken as keys are."
    )
    jwt_issuer: str = Field("", description="Whom tokens have to be of (`iss`).")
    jwt_audience: str = Field("", description="For whom tokens have to be (`aud`).")
    jwt_tenant_claim: str = Field("tenant", min_length=1, description="Claim of a token that names the tenant.")
    jwt_roles_claim: str = Field(
        "roles", min_length=1, description="Claim that has the roles, as a list or with spaces between them."
    )
    tenants_file: str | None = Field(
        None, min_length=1, description="Rates and weights of tenants (YAML), the same at every router; null: none."
    )
    sharing: Literal["never", "always"] = Field(
        "never", description="Whether requests of two tenants may share cached prefixes."
    )
    certificate_file: str | None = Field(
        None, min_length=1, description="PEM, the chain of routers and gateways; null: nothing is encrypted."
    )
    certificate_key_file: str | None = Field(None, min_length=1, description="PEM, its key.")
    client_ca_file: str | None = Field(
        None,
        min_length=1,
        description="PEM; clients have to show a certificate that one of these has signed. null: they need none.",
    )
    ca_file: str | None = Field(
        None, min_length=1, description="PEM; by which gateways know their routers. null: by the certificate itself."
    )
    server_name: str = Field(
        "", description="The name in the routers' certificate, where gateways call them by another, such as 127.0.0.1."
    )
    open: bool = Field(False, description="Without keys, let routers and gateways listen beyond loopback all the same.")
    audit_file: str | None = Field(
        None, min_length=1, description="Where administrative calls are written down, a line of JSON each."
    )
    metrics_need_key: bool = Field(
        False, description="Ask for a key with the role `observe` for a router's `/metrics`; never for its probes."
    )
    metrics_tls: bool = Field(
        False,
        description="Encrypt a router's metrics, probes and console with `certificate_file`. Clients may show a "
        "certificate there, and need none.",
    )

    @property
    def secret_path(self) -> str | None:
        """For processes that run in other folders."""
        return str(Path(self.secret_file).absolute()) if self.secret_file is not None else None

    @property
    def knows_callers(self) -> bool:
        """Who calls has to show who that is."""
        return self.keys_file is not None or self.jwt_jwks_file is not None

    @model_validator(mode="after")
    def _keys_need_the_secret(self) -> "SecuritySection":
        for name in ("keys_file", "jwt_jwks_file"):
            if getattr(self, name) is not None and self.secret_file is None:
                raise ValueError(f"{name} needs secret_file; `rachis keys secret` makes one")
        if self.tenants_file is not None and not self.knows_callers:
            raise ValueError("tenants_file needs keys_file or jwt_jwks_file, without which nobody has a tenant")
        if self.metrics_need_key and not self.knows_callers:
            raise ValueError("metrics_need_key needs keys_file or jwt_jwks_file, without which nobody has a key")
        if self.jwt_jwks_file is not None and not (self.jwt_issuer and self.jwt_audience):
            raise ValueError("jwt_jwks_file needs jwt_issuer and jwt_audience: tokens for others are not to be taken")
        return self

    @model_validator(mode="after")
    def _a_certificate_has_a_key(self) -> "SecuritySection":
        if (self.certificate_file is None) != (self.certificate_key_file is None):
            raise ValueError("certificate_file and certificate_key_file go together")
        if self.metrics_tls and self.certificate_file is None:
            raise ValueError("metrics_tls needs certificate_file, without which nothing is encrypted")
        for name in ("client_ca_file", "ca_file"):
            if self.certificate_file is None and getattr(self, name) is not None:
                raise ValueError(f"{name} needs certificate_file, without which nothing is encrypted")
        return self


class RaySection(Section):
    address: str | None = Field(None, description="null starts a local Ray with the service; `auto` joins one.")
    object_store_mib: int = Field(
        80, ge=75, description="Ray's minimum is enough: no token or block passes through it."
    )


class TracingSection(Section):
    """Where the time of requests goes; see docs/tracing.md."""

    memory_mib: int = Field(
        16, ge=0, le=1 << 16, description="Memory for the traces of late, half of it for notable ones."
    )
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]+(/\S*)?$",
        description="URL of a collector that takes OTLP, such as http://127.0.0.1:4317; null: traces are not exported.",
    )
    otlp_protocol: Literal["grpc", "http"] = Field("grpc", description="How it takes it: on port 4317, or on 4318.")
    sample_rate: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of requests exported; those that miss objectives.ttft_s, fail or migrate are in any case.",
    )
    queue_traces: int = Field(
        2048, ge=1, le=1_000_000, description="Traces that wait for the collector; more are dropped and counted."
    )
    timeout_s: Seconds = Field(5.0, description="How long the collector may take for one batch.")

    @property
    def otlp_url(self) -> str | None:
        """Where traces go: over HTTP with its usual path, unless the endpoint has one."""
        if self.otlp_endpoint is None or self.otlp_protocol == "grpc":
            return self.otlp_endpoint
        has_path = "/" in self.otlp_endpoint.partition("://")[2].rstrip("/")
        return self.otlp_endpoint if has_path else f"{self.otlp_endpoint.rstrip('/')}/v1/traces"

    @property
    def for_engines(self) -> "TracingSection":
        """What an engine is started with: what the router alone does is no reason to end one."""
        if self.otlp_endpoint is None:
            return TracingSection()
        return TracingSection(
            otlp_endpoint=self.otlp_endpoint, otlp_protocol=self.otlp_protocol, timeout_s=self.timeout_s
        )


class LimitsSection(Section):
    start_timeout_s: Seconds = Field(300.0, description="How long the engines may take to come up.")
    stop_timeout_s: Seconds = Field(30.0, description="How long a worker may take to stop before it is ended.")
    drain_timeout_s: Seconds = Field(
        600.0, description="How long a draining worker may finish what it runs before it leaves all the same."
    )
    session_grace_s: Seconds = Field(
        5.0, description="How long sessions that wait for input stay on a draining worker before they move to another."
    )
    stall_timeout_s: Seconds = Field(
        60.0,
        description="How long an engine may hang in one step, command or copy before its process is ended and started "
        "again.",
    )


class RachisConfig(Section):
    """The whole configuration in force."""

    service: ServiceSection = ServiceSection()
    objectives: ObjectivesSection = ObjectivesSection()
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    pools: PoolsSection = PoolsSection()
    handoff: HandoffSection = HandoffSection()
    router: RouterSection = RouterSection()
    gateway: GatewaySection = GatewaySection()
    streaming: StreamingSection = StreamingSection()
    tiers: TiersSection = TiersSection()
    decode: DecodeSection = DecodeSection()
    lora: LoraSection = LoraSection()
    index: IndexSection = IndexSection()
    placement: PlacementSection = PlacementSection()
    redis: RedisSection = RedisSection()
    security: SecuritySection = SecuritySection()
    ray: RaySection = RaySection()
    tracing: TracingSection = TracingSection()
    limits: LimitsSection = LimitsSection()
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "WARNING", description="The least that is logged by all processes; see docs/logs.md."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="A line each: for people, or for what collects logs."
    )

    @property
    def log_rules(self) -> LogRules:
        return LogRules(self.log_level, self.log_format)

    @property
    def workers_outlive_serve(self) -> bool:
        """The next `rachis serve` of that name finds its workers on the Ray that it joins."""
        return bool(self.service.name) and self.ray.address is not None and self.service.orphan_s > 0

    @property
    def placement_policy(self) -> str:
        """The policy in force. Prompts that are always to be prefilled apart go by none of the objectives."""
        section = self.placement
        if section.policy != "default":
            return section.policy
        keeps_both = self.pools.shared.workers and self.objectives.tpot_s and section.disaggregation != "always"
        return "objectives" if keeps_both else "hotness"

    @property
    def chunk_blocks(self) -> int:
        """Blocks of a chunk of the index: as many as its tokens fill."""
        return -(-self.index.chunk_tokens // self.engine.block_size_tokens)

    @model_validator(mode="after")
    def _workers_can_be_left(self) -> "RachisConfig":
        if self.service.leave_workers and not self.workers_outlive_serve:
            raise ValueError(
                "service.leave_workers needs service.name, ray.address and a service.orphan_s above 0: only workers of "
                "a named service on a Ray of their own outlive `rachis serve`"
            )
        return self

    @model_validator(mode="after")
    def _objectives_are_there(self) -> "RachisConfig":
        if self.placement.policy == "objectives" and not (self.pools.shared.workers and self.objectives.tpot_s):
            raise ValueError(
                "placement.policy objectives needs pools.shared.workers and objectives.tpot_s above 0: it weighs "
                "workers that do both by what they leave to both objectives"
            )
        return self

    @model_validator(mode="after")
    def _imitations_say_so(self) -> "RachisConfig":
        if self.engine.device != "imitated":
            return self
        if not self.model.name.startswith(IMITATED_NAME):
            raise ValueError(
                f"model.name must begin with {IMITATED_NAME} where engine.device is imitated: clients read in every "
                "answer that nothing was computed"
            )
        if self.lora.max_loaded:
            raise ValueError("lora.max_loaded must be 0 where engine.device is imitated: it has no weights to adapt")
        return self

    @model_validator(mode="after")
    def _gpus_for_every_rank(self) -> "RachisConfig":
        ranks = self.engine.tensor_parallel_size
        for name, pool in self.pools.in_use.items():
            too_few = not pool.gpus_per_worker > 0 or 1 < ranks > pool.gpus_per_worker
            if self.engine.device == "cuda" and too_few:
                raise ValueError(
                    f"pools.{name}.gpus_per_worker must be above 0 and at least the {ranks} of tensor_parallel_size"
                )
        return self
