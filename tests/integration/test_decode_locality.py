"""Decode steps of the real engine, timed by what their batch shares."""

from dataclasses import asdict

import pytest

from benchmarks.decode_locality.batches import Grid
from benchmarks.measuring_process import measure_in_process
from cluster_configs.schema import RachisConfig
from tests.process.benchmarks.test_cost_profile import SilentReports


@pytest.mark.integration
async def test_real_engine_shares_what_the_shapes_say() -> None:
    # The model takes no suffix of 5,000 tokens.
    grid = Grid((1, 4), (1, 2), (100, 256), (32, 5000))
    fitting = [shape for shape in grid.shapes() if shape.suffix_tokens == 32]
    arguments = {
        "config": RachisConfig().model_dump(mode="json"),
        "grid": asdict(grid),
        "rounds": 2,
        "limit_s": 600.0,
        "seed": 0,
    }
    figures = await measure_in_process("benchmarks.decode_locality.measure", arguments, SilentReports())
    assert figures["engine"] == "vllm"
    assert figures["kv_bytes_per_token"] == 4096
    assert figures["left_out"] == len(grid.shapes()) - len(fitting) > 0
    assert len(figures["points"]) == len({*grid.plain(), *grid.trees()}.intersection(fitting))
    assert all(point["step_ms"] > 0 and point["samples"] == 32 for point in figures["points"])
    # Fitted to what a busy machine measured: nothing may be left for it.
    assert figures["fit"]["base_ms"] >= 0
    assert figures["verdict"]["all_or_nothing"] in (True, False)
