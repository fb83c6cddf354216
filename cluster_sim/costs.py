"""What engines, links and copies cost in the simulator.

A cost model is a JSON file in `cluster_sim/cost_models/`, or one that a user gives; see `cost_models/README.md`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster_configs.json_files import read_object
from cluster_core.errors import InvalidInputError
from cluster_sim import cost_files


@dataclass(frozen=True, slots=True)
class StepWork:
    """One engine step.

    prefill_tokens: prompt tokens computed. prefill_pairs: pairs of such a token and one that it attends to.
    decode_requests: requests that get one token each. context_tokens: what they attend to, together.
    distinct_tokens: the same, with what several share counted once.
    """

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    decode_requests: int = 0
    context_tokens: float = 0.0
    distinct_tokens: float = 0.0


class CostModel(Protocol):
    """One model on the GPUs of one worker.

    kv_bytes_per_token: of all layers. device_tokens: KV that fits beside the weights. host_tokens: KV in the worker's
    part of host memory. gpus: of one worker. gpu_dollars_per_hour: of one GPU. network_bytes_per_s: of the worker's
    links, each direction. network_latency_s: of one transfer.
    """

    @property
    def name(self) -> str: ...
    @property
    def gpus(self) -> int: ...
    @property
    def gpu_dollars_per_hour(self) -> float: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def device_tokens(self) -> int: ...
    @property
    def host_tokens(self) -> int: ...
    @property
    def network_bytes_per_s(self) -> float: ...
    @property
    def network_latency_s(self) -> float: ...

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step. Linear in context_tokens and distinct_tokens where the model has them linear: the light
        engine takes many steps at once, each longer than the one before by the same."""
        ...

    def load_s(self, tokens: int) -> float:
        """KV of so many tokens from host memory to the device."""
        ...

    def store_s(self, tokens: int) -> float:
        """KV of so many tokens from the device to host memory."""
        ...


def prefill_work(chunks: Iterable[tuple[int, int]]) -> StepWork:
    """chunks: of each prompt, tokens computed before and in this step."""
    tokens, pairs = 0, 0.0
    for before, computed in chunks:
        tokens += computed
        pairs += computed * (before + computed / 2)
    return StepWork(prefill_tokens=tokens, prefill_pairs=pairs)


def load(name_or_path: str) -> CostModel:
    """The model of that name in `cost_models/`, or the one in a file. Raises InvalidInputError naming file and key."""
    # They know StepWork.
    from cluster_sim import measured_costs, roofline

    path = cost_files.path_of(name_or_path)
    content = read_object(path)
    kinds: Mapping[str, Callable[[str, Path, Mapping[str, Any]], CostModel]] = {
        "roofline": roofline.of_content,
        "measured": measured_costs.of_content,
    }
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidInputError(f"must be of {', '.join(kinds)}, got {kind!r}", field=f"{path}: kind")
    return kinds[kind](path.stem, path, content)


def names() -> list[str]:
    """Of the models that come with this package."""
    return cost_files.names_of(cost_files.FOLDER)
