"""`rachis bench tiers`, tiny: real engines, the same tokens from all, and what they did not compute."""

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest

from benchmarks.measuring_process import Reports
from benchmarks.tiers import COPY_EVERYTHING, RACHIS, STOCK, bench_tiers
from benchmarks.tiers_workload import TiersWorkload
from cluster_configs.loading import load
from cluster_sim.workloads.traces import Trace
from tests.engine_process import in_engine_process

pytestmark = pytest.mark.integration

BLOCK_TOKENS = 32
TIMEOUT_S = 600


def bench(*arguments: str) -> dict[str, Any]:
    """Its JSON object. Wrong tokens would have ended it with another exit code."""
    command = [sys.executable, "-m", "command_line.main", "bench", "tiers", "--json", "--rounds", "1", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def computed_with_a_cache_without_end(trace: Trace) -> int:
    """Tokens: full blocks are found, and one token at least is computed."""
    seen: set[int] = set()
    computed = 0
    for request in trace:
        reusable = request.hashes[: (request.input_tokens - 1) // BLOCK_TOKENS]
        computed += request.input_tokens - BLOCK_TOKENS * sum(each in seen for each in reusable)
        seen.update(request.hashes[: request.input_tokens // BLOCK_TOKENS])
    return computed


def test_where_prefixes_do_not_fit_the_device_rachis_computes_fewer_tokens_than_plain_vllm() -> None:
    told = bench("--requests", "80", "--device-blocks", "60", "--host-ratio", "4", "--seed", "3")
    stock, copied, rachis = (told["variants"][name] for name in (STOCK, COPY_EVERYTHING, RACHIS))
    assert rachis["tokens_computed"] < stock["tokens_computed"]
    assert rachis["vs_stock"]["tokens_computed"] < 1
    assert 0 < rachis["copied_bytes"] < copied["copied_bytes"]
    assert rachis["host_hit_tokens"] > 0
    assert copied["host_hit_tokens"] > 0
    assert stock["copied_bytes"] == stock["host_hit_tokens"] == 0
    for each in (stock, copied, rachis):
        assert each["prompt_tokens"] == told["workload"]["prompt_tokens"]
        hit_tokens = each["device_hit_tokens"] + each["host_hit_tokens"]
        assert each["prompt_tokens"] - hit_tokens == each["tokens_computed"]
        assert set(each["ttft_ms"]) == {"mean", "p50", "p90", "p99"}
        assert each["promoted_used_blocks"] + each["promoted_wasted_blocks"] <= each["promoted_blocks"]
    assert "samples_ms" not in told


def test_where_all_fits_the_device_nobody_computes_a_full_block_twice() -> None:
    workload = TiersWorkload("bbh", requests=30, noise_share=0.1)
    expected = computed_with_a_cache_without_end(workload.trace(BLOCK_TOKENS))
    measured = in_engine_process(measured_without_host_memory, workload)
    assert measured["workload"]["host_blocks"] == 0
    assert [each["tokens_computed"] for each in measured["variants"].values()] == [expected] * 3


def measured_without_host_memory(workload: TiersWorkload) -> dict[str, Any]:
    config = load(flags={"tiers.host_ratio": 0.0}).config.model_dump(mode="json")
    arguments = {"config": config, "workload": asdict(replace(workload, rounds=1)), "device_blocks": 1600}
    return asyncio.run(bench_tiers(arguments, mock.create_autospec(Reports, instance=True)))
