"""What a preemption costs by the victim's tokens: curves through measured points, and the file that keeps them. Pure,
apart from reading and writing it.

File format (that of the paper's artifact, both of its files in one): a JSON object with `recomputation_latencies`,
`swap_out_latency` and `swap_in_latency`, each `{tokens: [milliseconds, ...]}`, and `metadata`. One of the artifact's
own files, which hold one half each, is read too. `rachis profile` writes such a file.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from cluster_configs.json_files import read_object
from cluster_core.errors import InvalidInputError

RECOMPUTE_KEY = "recomputation_latencies"
SWAP_OUT_KEY = "swap_out_latency"
SWAP_IN_KEY = "swap_in_latency"


class LatencyCurve:
    """Milliseconds over tokens: straight lines between the medians of measured points, from (0, 0) on.

    Beyond the last point the last slope goes on, or the curve stays flat where noise made that slope negative.
    samples: every measurement, in milliseconds, by tokens.
    """

    def __init__(self, samples: Mapping[int, Sequence[float]]) -> None:
        self.samples = {tokens: tuple(samples[tokens]) for tokens in sorted(samples)}
        self._tokens = [0, *self.samples]
        self._ms = [0.0, *(median(each) for each in self.samples.values())]

    def ms(self, tokens: int) -> float:
        upper = min(max(1, bisect_left(self._tokens, tokens)), len(self._tokens) - 1)
        low, high = self._tokens[upper - 1], self._tokens[upper]
        slope = (self._ms[upper] - self._ms[upper - 1]) / (high - low)
        if tokens > high:
            slope = max(0.0, slope)
        return self._ms[upper] + slope * (tokens - high)

    @property
    def points(self) -> dict[int, float]:
        """Median milliseconds by tokens, without the origin."""
        return dict(zip(self._tokens[1:], self._ms[1:], strict=True))


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a preemption costs on one machine with one model, by the victim's tokens."""

    recompute: LatencyCurve
    swap_out: LatencyCurve
    swap_in: LatencyCurve
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def recompute_ms(self, tokens: int) -> float:
        return self.recompute.ms(tokens)

    def swap_ms(self, tokens: int) -> float:
        """Out and in again."""
        return self.swap_out.ms(tokens) + self.swap_in.ms(tokens)

    def swap_is_cheaper(self, tokens: int) -> bool:
        return self.swap_ms(tokens) < self.recompute_ms(tokens)

    def save(self, path: Path) -> None:
        curves = {RECOMPUTE_KEY: self.recompute, SWAP_OUT_KEY: self.swap_out, SWAP_IN_KEY: self.swap_in}
        content = {key: {str(tokens): each for tokens, each in curve.samples.items()} for key, curve in curves.items()}
        path.write_text(json.dumps({**content, "metadata": dict(self.metadata)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, rest: "CostModel") -> "CostModel":
        """The file's curves; a half that it does not have is taken from `rest`.

        Raises InvalidInputError naming file and key.
        """
        return cls.of_content(path, read_object(path), rest)

    @classmethod
    def of_content(cls, path: Path, content: Mapping[str, Any], rest: "CostModel") -> "CostModel":
        """As `load`, of what was read from `path`."""
        curves = {key: _curve(path, key, content[key]) for key in _ALL_KEYS if key in content}
        if not curves:
            raise InvalidInputError(f"has none of the keys {', '.join(_ALL_KEYS)}", field=str(path))
        for key, other in ((SWAP_OUT_KEY, SWAP_IN_KEY), (SWAP_IN_KEY, SWAP_OUT_KEY)):
            if key in curves and other not in curves:
                raise InvalidInputError(f"is missing, where {key} is given", field=f"{path}: {other}")
        metadata = content.get("metadata", {})
        if not isinstance(metadata, dict):
            raise InvalidInputError("must be an object", field=f"{path}: metadata")
        return cls(
            curves.get(RECOMPUTE_KEY, rest.recompute),
            curves.get(SWAP_OUT_KEY, rest.swap_out),
            curves.get(SWAP_IN_KEY, rest.swap_in),
            metadata,
        )


def default_model(device: Literal["cpu", "cuda"]) -> CostModel:
    """Rough figures for a machine that was never profiled: they tell which side is clearly cheaper, no more.

    cpu: the built-in model on one core, whose KV is small (4 KiB per token in fp32). cuda: an 8B model (128 KiB per
    token) at about 40,000 prefill tokens per second, and PCIe at 25 GB/s each way. `rachis profile` measures.
    """
    return _DEFAULTS[device]


def _rough(points_ms: Mapping[int, float]) -> LatencyCurve:
    return LatencyCurve({tokens: (each,) for tokens, each in points_ms.items()})


_DEFAULTS: Mapping[str, CostModel] = {
    "cpu": CostModel(
        _rough({16: 1.8, 512: 11.0, 1024: 25.0, 2048: 75.0, 4096: 245.0}),
        _rough({32: 0.03, 4096: 2.6}),
        _rough({32: 0.03, 4096: 2.6}),
    ),
    "cuda": CostModel(
        _rough({16: 10.0, 1024: 26.0, 16_384: 410.0, 131_072: 6_500.0}),
        _rough({16: 0.2, 1024: 5.4, 131_072: 690.0}),
        _rough({16: 0.2, 1024: 5.4, 131_072: 690.0}),
    ),
}

_ALL_KEYS = (RECOMPUTE_KEY, SWAP_OUT_KEY, SWAP_IN_KEY)
_MAX_DIGITS = 9
_MAX_MS = 1e9


def _curve(path: Path, key: str, given: object) -> LatencyCurve:
    if not isinstance(given, dict) or not given:
        raise InvalidInputError("must be an object of {tokens: [milliseconds, ...]}", field=f"{path}: {key}")
    samples = {}
    for tokens, latencies_ms in given.items():
        place = f"{path}: {key}.{tokens}"
        if not (tokens.isascii() and tokens.isdigit() and len(tokens) <= _MAX_DIGITS and int(tokens) > 0):
            raise InvalidInputError("must be a whole number of tokens above 0", field=place)
        if not isinstance(latencies_ms, list) or not latencies_ms or not all(map(_is_latency, latencies_ms)):
            raise InvalidInputError("must be a list of milliseconds, none below 0", field=place)
        samples[int(tokens)] = latencies_ms
    return LatencyCurve(samples)


def _is_latency(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_MS
