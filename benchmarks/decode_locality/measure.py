"""What a decode step costs by what its requests share: the measurement behind `rachis bench decode-locality`.

Shapes of batches (`batches`) are visited in rounds, each in a new random order, so that a disturbance
of the machine hits some visits of many shapes instead of all of one; the first round is always whole, another one
starts only while it would end in time. Where vLLM runs, steps of a plain vLLM engine are timed; on CUDA without vLLM,
attention alone (`synthetic_attention`: never run on a GPU so far). Result, the file of `--output`:

    {"format": 1, "engine", "device", "caches_bytes", "model", "dtype", "threads", "block_size_tokens",
     "kv_bytes_per_token", "made", "seed", "rounds", "took_s", "foreign_cores",
     "points": [{"batch", "groups", "shared_tokens", "suffix_tokens", "order", "levels", "distinct_tokens",
                 "total_tokens", "step_ms", "samples", "spread"}],
     "divergence": [a point's keys, "divergent", "strangers"], "fit", "cache_fit", "verdict": fit.verdict}
"""

import os
import platform
import random
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from benchmarks.decode_locality.batches import BatchShape, Grid, pool_blocks
from benchmarks.decode_locality.fit import Measured, Sample, fit_cache, fit_linear, verdict
from benchmarks.measuring_process import Reports, foreign_cpu_s, run_measurement
from cluster_configs.schema import RachisConfig
from cluster_core.clock import monotonic_s, unix_ms
from cluster_core.errors import InvalidInputError, UnavailableError
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment

FORMAT = 1
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Decoder(Protocol):
    """Something that decodes batches of a shape: a vLLM engine, or attention on a GPU."""

    name: str
    block_size_tokens: int

    def facts(self) -> dict[str, Any]: ...

    def holds(self, shape: BatchShape) -> bool: ...

    def prepare(self, shapes: Iterable[BatchShape]) -> None: ...

    def visit(self, shape: BatchShape) -> list[float]:
        """Milliseconds of each timed step."""
        ...

    def stop(self) -> None: ...


# Of a configuration, a grid, a seed.
MakeDecoder = Callable[[RachisConfig, Grid, int, Reports], Decoder]


async def measure(
    arguments: dict[str, Any], reports: Reports, make_decoder: MakeDecoder | None = None
) -> dict[str, Any]:
    """The result for `RachisConfig` "config" and `Grid` "grid", in "rounds" at most and about "limit_s" from now."""
    began_s, foreign_s = monotonic_s(), foreign_cpu_s()
    config = RachisConfig.model_validate(arguments["config"])
    grid = Grid(**{name: tuple(values) for name, values in arguments["grid"].items()})
    decoder = (make_decoder or _decoder)(config, grid, arguments["seed"], reports)
    try:
        fitting = [shape for shape in grid.shapes() if decoder.holds(shape)]
        if not fitting:
            raise InvalidInputError("no batch of the grid fits the model's length and the KV pool", field="grid")
        reports.total(len(fitting) * arguments["rounds"])
        reports.phase("prefixes")
        decoder.prepare(fitting)
        reports.phase("decode steps")
        visits = visit_in_rounds(
            fitting,
            arguments["rounds"],
            decoder.visit,
            lambda: arguments["limit_s"] - (monotonic_s() - began_s),
            random.Random(arguments["seed"]),
            reports.done,
        )
        facts = decoder.facts()
    finally:
        decoder.stop()
    took_s = monotonic_s() - began_s
    measured = {shape: Measured.of_visits(each) for shape, each in visits.items()}
    return {
        "format": FORMAT,
        "engine": decoder.name,
        **_machine(config),
        **facts,
        "made": datetime.fromtimestamp(unix_ms() / 1000, UTC).isoformat(timespec="seconds"),
        "seed": arguments["seed"],
        "rounds": max(map(len, visits.values())),
        "took_s": round(took_s, 1),
        "foreign_cores": round((foreign_cpu_s() - foreign_s) / took_s, 2),
        "left_out": len(grid.shapes()) - len(fitting),
        **result(grid, measured, decoder.block_size_tokens),
    }


def visit_in_rounds(
    shapes: Sequence[BatchShape],
    rounds: int,
    visit: Callable[[BatchShape], list[float]],
    left_s: Callable[[], float],
    rng: random.Random,
    done: Callable[[int], None],
) -> dict[BatchShape, list[list[float]]]:
    """Of each shape, the steps of each round's visit."""
    visits: dict[BatchShape, list[list[float]]] = {shape: [] for shape in shapes}
    longest_s = 0.0
    for number in range(rounds):
        before_s = left_s()
        if number and longest_s > before_s:
            done(len(shapes) * (rounds - number))
            break
        for shape in rng.sample(shapes, len(shapes)):
            visits[shape].append(visit(shape))
            done(1)
        longest_s = max(longest_s, before_s - left_s())
    return visits


def result(grid: Grid, measured: dict[BatchShape, Measured], block_tokens: int) -> dict[str, Any]:
    """What is measured, the models fitted to it, and the verdict. The models know nothing of the series, which the
    verdict compares them with."""
    points = [shape for shape in (*grid.plain(), *grid.trees()) if shape in measured]
    series = [shape for shape in grid.series() if shape in measured]
    samples: list[Sample] = [(each.batch, each.reads(block_tokens), measured[each].step_ms) for each in points]
    models = {"linear": fit_linear(samples), "cache": fit_cache(samples)}
    return {
        "points": [_point(shape, measured[shape], block_tokens) for shape in points],
        "divergence": [
            _point(shape, measured[shape], block_tokens)
            | {"divergent": shape.divergent, "strangers": shape.strangers}
            for shape in series
        ],
        "fit": models["linear"].figures(),
        "cache_fit": models["cache"].figures(),
        "verdict": verdict(grid, measured, models, block_tokens),
    }  # fmt: skip


def _point(shape: BatchShape, measured: Measured, block_tokens: int) -> dict[str, Any]:
    reads = shape.reads(block_tokens)
    return {
        "batch": shape.batch,
        "groups": shape.groups,
        "shared_tokens": shape.shared_tokens,
        "suffix_tokens": shape.suffix_tokens,
        "order": shape.order,
        "levels": [list(level) for level in shape.levels],
        "distinct_tokens": reads.distinct_tokens,
        "total_tokens": reads.total_tokens,
        "step_ms": round(measured.step_ms, 4),
        "samples": measured.samples,
        "spread": round(measured.spread, 4),
    }


def _decoder(config: RachisConfig, grid: Grid, seed: int, reports: Reports) -> Decoder:
    """Raises UnavailableError where there is nothing to measure with."""
    if config.engine.device == "cuda" and find_spec("vllm") is None:
        from benchmarks.decode_locality.synthetic_attention import LLAMA_3_1_8B, TritonDecode

        return TritonDecode(LLAMA_3_1_8B, seed)
    if find_spec("vllm") is None:
        raise UnavailableError("vLLM is not installed here")
    from benchmarks.decode_locality.vllm_decoder import VllmDecode, engine_config

    shapes = grid.shapes()
    config = engine_config(config, shapes, pool_blocks(shapes, config.engine.block_size_tokens))
    settings = EngineSettings(config.model, config.engine, config.handoff, EngineRole.ALONE)
    os.environ.update(engine_environment(settings))
    return VllmDecode(settings, seed, reports)


def _machine(config: RachisConfig) -> dict[str, Any]:
    if config.engine.device == "cuda":
        import torch

        device = torch.cuda.get_device_properties(0)
        return {"device": device.name, "caches_bytes": {"L2": device.L2_cache_size}, "threads": config.engine.threads}
    return {"device": _cpu_name(), "caches_bytes": _cpu_caches(), "threads": config.engine.threads}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cpu_caches() -> dict[str, int]:
    """Of the first core, by level; instructions left out. Empty where the system does not say."""
    caches = {}
    for folder in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            caches[f"L{level}"] = int(size[:-1]) << 10
    return caches


if __name__ == "__main__":
    run_measurement(measure)
