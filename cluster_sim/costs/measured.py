"""What engine steps cost as measured: prefill by `rachis profile`, decode by `rachis bench decode-locality`.

    {"kind": "measured", "profile": ..., "decode": ..., and the numbers of `QUANTITIES`}

profile, decode: a path beside the file, or the content itself. Prefill: the measured points with lines between them,
for prompts of which nothing was computed before; other chunks, and several in a step, by what a fit to the points says
of their tokens and pairs in proportion. Decode: for each batch size that was measured a line over total and distinct
context, since one for all of them errs by 9% at the median; between batch sizes the lines are interpolated, and beyond
the largest the last two go on. A step that does both pays the smaller of the two fixed parts once only.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster_configs import preemption_costs
from cluster_configs.json_files import read_object
from cluster_core.errors import InvalidInputError
from cluster_sim.costs.cost_files import Quantity, check_keys, number
from cluster_sim.costs.step_work import StepWork

QUANTITIES: Mapping[str, Quantity] = {
    "gpus": Quantity("GPUs", whole=True),
    "dollars_per_hour": Quantity("$/h", least_allowed=True),
    "device_tokens": Quantity("tokens", whole=True),
    "host_tokens": Quantity("tokens", whole=True, least_allowed=True),
    "network_bytes_per_s": Quantity("bytes/s"),
    "network_latency_s": Quantity("s", least_allowed=True),
}


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One measured step. Tokens as in `step_work.StepWork`."""

    batch: int
    context_tokens: float
    distinct_tokens: float
    step_s: float


class MeasuredPrefill:
    """Seconds of a prefill step by its tokens and pairs."""

    def __init__(self, curve: preemption_costs.LatencyCurve) -> None:
        self._curve = curve
        tokens = np.array(list(curve.points), dtype=np.float64)
        seconds = np.array(list(curve.points.values())) / 1000
        rows = np.stack([np.ones_like(tokens), tokens, tokens**2 / 2], axis=1)
        fit: list[float] = _relative_fit(rows, seconds).tolist()
        self.fixed_s, self._s_per_token, self._s_per_pair = fit
        self._least = int(tokens[0])

    def seconds(self, tokens: int, pairs: float) -> float:
        # Below the smallest point the curve goes to the origin, where a step does not.
        at = max(tokens, self._least)
        correction = self._curve.ms(at) / 1000 / self._fitted_s(at, at * at / 2)
        return self._fitted_s(tokens, pairs) * correction

    def _fitted_s(self, tokens: float, pairs: float) -> float:
        return self.fixed_s + self._s_per_token * tokens + self._s_per_pair * pairs


class MeasuredDecode:
    """Seconds of a decode step by batch and context, linear in the context for each batch."""

    def __init__(self, steps: Sequence[DecodeStep]) -> None:
        self._batches = sorted({step.batch for step in steps})
        self._lines = [_line([step for step in steps if step.batch == batch]) for batch in self._batches]

    def seconds(self, batch: int, context_tokens: float, distinct_tokens: float) -> float:
        line: list[float] = self._at(batch).tolist()
        fixed_s, s_per_token, s_per_distinct = line
        return max(0.0, fixed_s + s_per_token * context_tokens + s_per_distinct * distinct_tokens)

    def fixed_s(self, batch: int) -> float:
        return max(0.0, float(self._at(batch)[0]))

    def _at(self, batch: int) -> NDArray[np.float64]:
        """Costs of context are not extrapolated: between the last two they may fall, and would end below zero."""
        if len(self._batches) == 1:
            return self._lines[0]
        upper = min(max(1, bisect_right(self._batches, batch)), len(self._batches) - 1)
        low, high = self._lines[upper - 1], self._lines[upper]
        share = (batch - self._batches[upper - 1]) / (self._batches[upper] - self._batches[upper - 1])
        line = low + (high - low) * max(0.0, min(1.0, share))
        line[0] = low[0] + (high[0] - low[0]) * max(0.0, share) if high[0] > low[0] else line[0]
        return line


class MeasuredCosts:
    """`step_work.CostModel` of what was measured. numbers: by the names of `QUANTITIES`."""

    def __init__(
        self,
        name: str,
        profile: preemption_costs.CostModel,
        decode: MeasuredDecode,
        kv_bytes_per_token: int,
        numbers: Mapping[str, float],
    ) -> None:
        self.name = name
        self.gpus = int(numbers["gpus"])
        self.gpu_dollars_per_hour = numbers["dollars_per_hour"]
        self.kv_bytes_per_token = kv_bytes_per_token
        self.device_tokens = int(numbers["device_tokens"])
        self.host_tokens = int(numbers["host_tokens"])
        self.network_bytes_per_s = numbers["network_bytes_per_s"]
        self.network_latency_s = numbers["network_latency_s"]
        self._copies = profile
        self._prefill = MeasuredPrefill(profile.recompute)
        self._decode = decode

    def step_s(self, work: StepWork) -> float:
        prefill_s = decode_s = shared_s = 0.0
        if work.prefill_tokens:
            prefill_s = self._prefill.seconds(work.prefill_tokens, work.prefill_pairs)
        if work.decode_requests:
            decode_s = self._decode.seconds(work.decode_requests, work.context_tokens, work.distinct_tokens)
        if work.prefill_tokens and work.decode_requests:
            shared_s = min(self._prefill.fixed_s, self._decode.fixed_s(work.decode_requests), prefill_s)
        return prefill_s + decode_s - shared_s

    def load_s(self, tokens: int) -> float:
        return self._copies.swap_in.ms(tokens) / 1000

    def store_s(self, tokens: int) -> float:
        return self._copies.swap_out.ms(tokens) / 1000


def _line(steps: Sequence[DecodeStep]) -> NDArray[np.float64]:
    rows = np.array([(1.0, step.context_tokens, step.distinct_tokens) for step in steps])
    return _relative_fit(rows, np.array([step.step_s for step in steps]))


def _relative_fit(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of the relative errors; no coefficient is negative. Exact, by trying every set of columns."""
    width = rows.shape[1]
    weighted = rows / seconds[:, None]
    best, least = np.zeros(width), np.inf
    for size in range(1, width + 1):
        for columns in map(list, combinations(range(width), size)):
            found = np.linalg.lstsq(weighted[:, columns], np.ones(len(seconds)), rcond=None)[0]
            error = float(np.sum((weighted[:, columns] @ found - 1) ** 2))
            if np.all(found >= 0) and error < least - 1e-12:
                least, best = error, np.zeros(width)
                best[columns] = found
    return best


def of_content(name: str, path: Path, content: Mapping[str, Any]) -> MeasuredCosts:
    """Of a file's content. Raises InvalidInputError naming file and key."""
    check_keys(content, ("kind", "profile", "decode", *QUANTITIES), f"{path}: ")
    numbers = {key: number(content, key, each, f"{path}: ") for key, each in QUANTITIES.items()}
    profile_path, profile_content = _part(path, content, "profile")
    for key in (preemption_costs.RECOMPUTE_KEY, preemption_costs.SWAP_OUT_KEY, preemption_costs.SWAP_IN_KEY):
        if key not in profile_content:
            raise InvalidInputError("is missing", field=f"{profile_path}: {key}")
    profile = preemption_costs.CostModel.of_content(
        profile_path, profile_content, preemption_costs.default_model("cpu")
    )
    decode_path, decode_content = _part(path, content, "decode")
    kv_bytes = decode_content.get("kv_bytes_per_token")
    if not Quantity("bytes", whole=True).fits(kv_bytes):
        raise InvalidInputError(
            f"must be a whole number above 0, got {kv_bytes!r}", field=f"{decode_path}: kv_bytes_per_token"
        )
    decode = MeasuredDecode(_decode_steps(decode_path, decode_content.get("points")))
    return MeasuredCosts(name, profile, decode, int(str(kv_bytes)), numbers)


def _part(path: Path, content: Mapping[str, Any], key: str) -> tuple[Path, dict[str, Any]]:
    given = content.get(key)
    if isinstance(given, dict):
        return path, given
    if not isinstance(given, str):
        raise InvalidInputError("must be an object, or the path of a file", field=f"{path}: {key}")
    file = path.parent / given
    return file, read_object(file)


def _decode_steps(path: Path, points: object) -> list[DecodeStep]:
    if not isinstance(points, list) or not points:
        raise InvalidInputError("must be a list of measured points", field=f"{path}: points")
    return [_decode_step(f"{path}: points[{index}]", point) for index, point in enumerate(points)]


_POINT = {
    "batch": Quantity("count", whole=True),
    "total_tokens": Quantity("tokens"),
    "distinct_tokens": Quantity("tokens"),
    "step_ms": Quantity("ms"),
}


def _decode_step(place: str, point: object) -> DecodeStep:
    if not isinstance(point, dict):
        raise InvalidInputError("must be an object", field=place)
    for key, quantity in _POINT.items():
        if not quantity.fits(point.get(key)):
            raise InvalidInputError(f"must be {quantity.words}, got {point.get(key)!r}", field=f"{place}.{key}")
    return DecodeStep(point["batch"], point["total_tokens"], point["distinct_tokens"], point["step_ms"] / 1000)
