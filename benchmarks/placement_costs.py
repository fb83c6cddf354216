"""What prefill costs on a simulated worker: a few coefficients, fitted to a measured profile or given in a file.

A prompt of n tokens whose first c are cached takes `fixed_s`, a time for each of its n - c tokens, and one for each
pair of such a token with one before it, of which there are (n^2 - c^2) / 2: attention. What is loaded from host memory
takes its time as well. So one curve over prompts that nobody has seen, as `rachis profile` measures it, says what any
prompt costs.

Without a file the figures are those of the project's rough profile of an 8B model on a current data centre GPU.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from cluster_configs.json_files import read_object
from cluster_configs.preemption_costs import RECOMPUTE_KEY, CostModel, default_model
from cluster_core.errors import InvalidInputError
from cluster_sim.costs.step_work import StepWork


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """Seconds of any prefill, and for each token computed, each pair of tokens, each token loaded from host memory."""

    fixed_s: float
    s_per_token: float
    s_per_pair: float
    load_s_per_token: float

    def prefill_s(self, prompt_tokens: int, device_tokens: int, host_tokens: int) -> float:
        """device_tokens, host_tokens: of the prompt's beginning, on the device and following on the host."""
        cached = device_tokens + host_tokens
        pairs = (prompt_tokens * prompt_tokens - cached * cached) / 2
        computing_s = self.fixed_s + self.s_per_token * (prompt_tokens - cached) + self.s_per_pair * pairs
        return computing_s + self.load_s_per_token * host_tokens

    def table(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """`PrefillCosts` as a cost model of the simulator, for workers that do nothing but prefill.

    A copy to host memory takes no time. What the bench does not measure is 0: links, memory, money.
    """

    costs: PrefillCosts
    name: str = "prefill"
    gpus: int = 1
    gpu_dollars_per_hour: float = 0.0
    kv_bytes_per_token: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    network_bytes_per_s: float = 0.0
    network_latency_s: float = 0.0

    def step_s(self, work: StepWork) -> float:
        return (
            self.costs.fixed_s
            + self.costs.s_per_token * work.prefill_tokens
            + self.costs.s_per_pair * work.prefill_pairs
        )

    def load_s(self, tokens: int) -> float:
        return self.costs.load_s_per_token * tokens

    def store_s(self, tokens: int) -> float:
        return 0.0


def default_costs() -> PrefillCosts:
    return fitted(default_model("cuda"))


def read_costs(path: Path) -> PrefillCosts:
    """A profile that `rachis profile` wrote, or an object with the fields of `PrefillCosts`.

    Raises InvalidInputError naming file and key.
    """
    content = read_object(path)
    if RECOMPUTE_KEY in content:
        return fitted(CostModel.load(path, default_model("cuda")))
    return PrefillCosts(**{each.name: _seconds(path, content, each.name) for each in fields(PrefillCosts)})


def fitted(profile: CostModel) -> PrefillCosts:
    """To the medians of a profile, by least squares of the relative errors; no coefficient is negative."""
    points = profile.recompute.points
    tokens = np.array(list(points), dtype=np.float64)
    seconds = np.array(list(points.values())) / 1000
    columns = np.stack([np.ones_like(tokens), tokens, tokens**2 / 2], axis=1) / seconds[:, None]
    fixed_s, s_per_token, s_per_pair = _not_negative(columns, np.ones_like(tokens))
    largest, load_ms = list(profile.swap_in.points.items())[-1]
    return PrefillCosts(fixed_s, s_per_token, s_per_pair, load_ms / 1000 / largest)


def _not_negative(columns: "np.ndarray[Any, np.dtype[np.float64]]", wanted: Any) -> tuple[float, ...]:
    """The best fit among those of all choices of columns that need no negative coefficient."""
    width = columns.shape[1]
    best, least = np.zeros(width), math.inf
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            found, *_ = np.linalg.lstsq(columns[:, chosen], wanted, rcond=None)
            error = float(np.sum((columns[:, chosen] @ found - wanted) ** 2))
            if (found >= 0).all() and error < least:
                least, best = error, np.zeros(width)
                best[list(chosen)] = found
    return tuple(float(each) for each in best)


def _seconds(path: Path, content: Mapping[str, Any], name: str) -> float:
    value = content.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise InvalidInputError(f"must be a number of seconds from 0 on, got {value!r}", field=f"{path}: {name}")
    return float(value)
