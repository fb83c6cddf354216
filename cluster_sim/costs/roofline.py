"""What engine steps cost by public figures of GPU and model: the slower of computing and reading, as in a roofline.

    step       step_s + max(matrix FLOPs, weights read) + attention + all-reduces
    matrix     2 FLOPs for each parameter of a layer and token; the output matrix only for tokens that are sampled
    prefill    4 FLOPs for each pair of tokens, head and number of a head (arXiv:2307.08691, section 4)
    decode     KV of the distinct tokens from device memory; what is read again in the same step from the L2 cache as
               far as it is still there, else from device memory. Requests that share lie side by side in the batch, so
               between two reads of a tile are the tiles that all multiprocessors have in flight, in one layer
    links      two all-reduces of a layer's output in each layer, when the model is split over GPUs

So it is linear in the context, and there is no cliff when one request diverges (`docs/decode.md`). Nothing overlaps
but computing and reading of the same product. KV fills what weights and `reserve_bytes` leave of the device's share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cluster_core.errors import InvalidInputError
from cluster_sim.costs.cost_files import COUNT, SHARE, Quantity, check_keys, number, table
from cluster_sim.costs.step_work import StepWork


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU with its part of the server: peaks, what share of them is reached, and its price."""

    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    l2_bytes: float
    l2_bytes_per_s: float
    multiprocessors: float
    host_bytes_per_s: float
    host_bytes: float
    network_bytes_per_s: float
    network_latency_s: float
    all_reduce_bytes_per_s: float
    all_reduce_latency_s: float
    dense_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    dollars_per_hour: float


@dataclass(frozen=True, slots=True)
class Model:
    parameters: float
    layers: float
    hidden: float
    heads: float
    kv_heads: float
    head_dim: float
    vocabulary: float
    dtype_bytes: float

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def output_parameters(self) -> float:
        """Of the output matrix; the input embedding has as many."""
        return self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> float:
        """Of all layers: what each token is multiplied with."""
        return self.parameters - 2 * self.output_parameters


@dataclass(frozen=True, slots=True)
class Engine:
    """reserve_bytes: of each GPU, for all but weights and KV. step_s: of a step, beside what it computes."""

    step_s: float
    memory_utilization: float
    reserve_bytes: float
    attention_tile_tokens: float
    attention_tiles_in_flight: float


_BYTES = Quantity("bytes")
_RATE = Quantity("bytes/s")
_SECONDS = Quantity("s", least_allowed=True)

QUANTITIES: Mapping[str, Mapping[str, Quantity]] = {
    "gpu": {
        "flops_per_s": Quantity("FLOP/s"),
        "memory_bytes": _BYTES,
        "memory_bytes_per_s": _RATE,
        "l2_bytes": _BYTES,
        "l2_bytes_per_s": _RATE,
        "multiprocessors": COUNT,
        "host_bytes_per_s": _RATE,
        "host_bytes": Quantity("bytes", least_allowed=True),
        "network_bytes_per_s": _RATE,
        "network_latency_s": _SECONDS,
        "all_reduce_bytes_per_s": _RATE,
        "all_reduce_latency_s": _SECONDS,
        "dense_efficiency": SHARE,
        "attention_efficiency": SHARE,
        "memory_efficiency": SHARE,
        "dollars_per_hour": Quantity("$/h", least_allowed=True),
    },
    "model": {
        **{each.name: COUNT for each in fields(Model)},
        "dtype_bytes": Quantity("bytes", most=8),
    },
    "engine": {
        "step_s": _SECONDS,
        "memory_utilization": SHARE,
        "reserve_bytes": Quantity("bytes", least_allowed=True),
        "attention_tile_tokens": Quantity("tokens", whole=True),
        "attention_tiles_in_flight": COUNT,
    },
}
_FOLDERS = {"gpu": "gpus", "model": "models", "engine": "engines"}
_GPUS = Quantity("GPUs", whole=True)


class Roofline:
    """`step_work.CostModel` of one model, split over `gpus` GPUs."""

    def __init__(self, name: str, gpu: Gpu, model: Model, engine: Engine, gpus: int) -> None:
        self.name = name
        self.gpus = gpus
        self.gpu_dollars_per_hour = gpu.dollars_per_hour
        self.kv_bytes_per_token = round(model.kv_bytes_per_token)
        weights_bytes = model.parameters * model.dtype_bytes
        left_bytes = gpus * (gpu.memory_bytes * engine.memory_utilization - engine.reserve_bytes) - weights_bytes
        # Heads of KV are not split further than one by one: what is beyond that is held several times.
        copies = max(1.0, gpus / model.kv_heads)
        self.device_tokens = int(left_bytes / (model.kv_bytes_per_token * copies))
        self.host_tokens = int(gpus * gpu.host_bytes / model.kv_bytes_per_token)
        self.network_bytes_per_s = gpus * gpu.network_bytes_per_s
        self.network_latency_s = gpu.network_latency_s
        self._copied_bytes_per_s = gpus * gpu.host_bytes_per_s
        self._step_s = engine.step_s
        dense_flops_per_s = gpus * gpu.flops_per_s * gpu.dense_efficiency
        read_bytes_per_s = gpus * gpu.memory_bytes_per_s * gpu.memory_efficiency
        self._s_per_token = 2 * model.layer_parameters / dense_flops_per_s
        self._s_per_sample = 2 * model.output_parameters / dense_flops_per_s
        self._weights_s = (model.parameters - model.output_parameters) * model.dtype_bytes / read_bytes_per_s
        attention_flops = 4 * model.layers * model.heads * model.head_dim
        self._s_per_pair = attention_flops / (gpus * gpu.flops_per_s * gpu.attention_efficiency)
        self._s_per_distinct = model.kv_bytes_per_token * copies / read_bytes_per_s
        self._s_per_reread = self._s_per_distinct * _reread_cost(gpu, model, engine)
        self._all_reduce_s, self._all_reduce_s_per_token = _all_reduces(gpu, model, gpus)

    def step_s(self, work: StepWork) -> float:
        tokens = work.prefill_tokens + work.decode_requests
        if not tokens:
            return self._step_s
        computing_s = tokens * self._s_per_token + work.decode_requests * self._s_per_sample
        attention_s = (
            work.prefill_pairs * self._s_per_pair
            + work.distinct_tokens * self._s_per_distinct
            + max(0.0, work.context_tokens - work.distinct_tokens) * self._s_per_reread
        )
        links_s = self._all_reduce_s + tokens * self._all_reduce_s_per_token
        return self._step_s + max(computing_s, self._weights_s) + attention_s + links_s

    def load_s(self, tokens: int) -> float:
        return tokens * self.kv_bytes_per_token / self._copied_bytes_per_s

    def store_s(self, tokens: int) -> float:
        return self.load_s(tokens)


def _reread_cost(gpu: Gpu, model: Model, engine: Engine) -> float:
    """Of reading KV once more in the same step, as a share of reading it from device memory."""
    tile_bytes = 2 * engine.attention_tile_tokens * model.head_dim * model.dtype_bytes
    in_flight_bytes = gpu.multiprocessors * engine.attention_tiles_in_flight * tile_bytes
    hits = min(1.0, gpu.l2_bytes / in_flight_bytes)
    return 1 - hits + hits * min(1.0, gpu.memory_bytes_per_s * gpu.memory_efficiency / gpu.l2_bytes_per_s)


def _all_reduces(gpu: Gpu, model: Model, gpus: int) -> tuple[float, float]:
    """Seconds of a step's all-reduces: whatever the batch, and for each token. A ring moves all but one share twice."""
    if gpus == 1:
        return 0.0, 0.0
    number_of_them = 2 * model.layers
    moved_bytes = 2 * (gpus - 1) / gpus * model.hidden * model.dtype_bytes
    return number_of_them * gpu.all_reduce_latency_s, number_of_them * moved_bytes / gpu.all_reduce_bytes_per_s


def of_content(name: str, path: Path, content: Mapping[str, Any]) -> Roofline:
    """Of a file's content. Raises InvalidInputError naming file and key."""
    check_keys(content, ("kind", *QUANTITIES, "tensor_parallel"), f"{path}: ")
    tables = {key: table(content, key, QUANTITIES[key], _FOLDERS[key], path) for key in QUANTITIES}
    model = Model(**tables["model"])
    gpus = int(number(content, "tensor_parallel", _GPUS, f"{path}: "))
    if model.heads % gpus:
        raise InvalidInputError(
            f"must divide the model's {model.heads:.0f} heads, got {gpus}", field=f"{path}: tensor_parallel.value"
        )
    if model.layer_parameters <= 0:
        raise InvalidInputError("are fewer than the embeddings have", field=f"{path}: model.parameters.value")
    roofline = Roofline(name, Gpu(**tables["gpu"]), model, Engine(**tables["engine"]), gpus)
    if roofline.device_tokens <= 0:
        weights_gb = model.parameters * model.dtype_bytes / 1e9
        raise InvalidInputError(
            f"of {gpus} leaves no room for KV beside {weights_gb:.1f} GB of weights", field=f"{path}: tensor_parallel"
        )
    return roofline
