"""The work of one engine step, and what a cost model says it takes: the protocol of all cost models."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


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
