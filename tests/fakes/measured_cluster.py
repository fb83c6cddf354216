"""A made-up cluster whose figures are known, as if it had been measured."""

from pathlib import Path
from typing import Any, cast

from benchmarks.validation import model as validation_model
from benchmarks.validation.cluster import BatchPoint, Cluster, Measured, PromptPoint
from cluster_configs.schema import PlacementSection, RachisConfig

HOP_S, LATENCY_S, S_PER_TOKEN, STEP_S = 0.001, 0.004, 1e-6, 0.003
CONFIG = RachisConfig(placement=PlacementSection(disaggregation="always"))


def prefill_s(tokens: int) -> float:
    return 0.005 + 3e-5 * tokens + 1e-8 * tokens * tokens / 2


def decode_s(batch: int, context_tokens: float) -> float:
    return STEP_S + 0.0002 * (batch - 1) + 2e-7 * context_tokens


def gap_s(tokens: int) -> float:
    return 2 * HOP_S + LATENCY_S + S_PER_TOKEN * tokens + decode_s(1, tokens)


def measured(prefill_slowdown: float = 1.0, decode_slowdown: float = 1.0) -> Measured:
    return Measured(
        tuple(
            PromptPoint(each, prefill_s(each), prefill_s(each) + 2 * HOP_S, gap_s(each))
            for each in (32, 256, 1024, 2048, 3500)
        ),
        tuple(
            BatchPoint(batch, batch * context, decode_s(batch, batch * context))
            for batch in (1, 4, 16)
            for context in (64, 1024)
        ),
        prefill_slowdown,
        decode_slowdown,
    )


def cluster() -> Cluster:
    return Cluster(cast(Any, None), 1000, 0, lambda: None)


def model_file(folder: Path, found: Measured) -> Path:
    file = folder / "measured.json"
    validation_model.write(validation_model.cost_model(found, CONFIG), file)
    return file
