"""vLLM's own benchmark: ours over it, and as it is, against a running service."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from command_line.own_service import Target
from tests import ROOT
from tests.integration import secured
from worker_runtime.preloaded_python import engine_python

pytestmark = pytest.mark.integration

SMALL = ("--num-prompts", "4", "--random-input-len", "100", "--random-output-len", "5", "--max-concurrency", "2")


async def output_of(*command: str) -> tuple[int, str, str]:
    """command: a module or a file of Python, whose process has vLLM loaded, as workers have."""
    process = await asyncio.create_subprocess_exec(
        *(*engine_python(), *command),
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 240)
    return process.returncode or 0, out.decode(), err.decode()


@secured.for_open_services
async def test_three_ways_into_a_service_are_compared_by_one_benchmark(target: Target, gateway: str) -> None:
    ways = ("openai-chat", "rachis", "rachis-session")
    asked = [option for way in ways for option in ("--backend", way)]
    code, out, err = await output_of(
        *("-m", "command_line.main", "bench", "serve", *asked, "--base-url", gateway, "--address", target.address),
        *("--pieces", "3", "--piece-interval-ms", "5", *SMALL, "--json"),
    )
    assert code == 0, err
    result = json.loads(out)
    assert {way: (found["completed"], found["failed"]) for way, found in result["backends"].items()} == dict.fromkeys(
        ways, (4, 0)
    )
    assert set(result["ratios"]) == {"rachis", "rachis-session"}
    assert all(found["median_ttft_ms"] > 0 for found in result["backends"].values())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--backend", "nothing"), "--backend: nothing is none of"),
        (("--base-url", "http://127.0.0.1:1"), "--base-url: http://127.0.0.1:1/v1/models does not say"),
        (("--num-prompts", "x"), "invalid int value"),
        (("--random-input-len", "9000"), "the model's length is 4096"),
    ],
)
async def test_what_cannot_be_measured_is_a_sentence(target: Target, options: tuple[str, ...], sentence: str) -> None:
    over_grpc = () if "--base-url" in options or "--backend" in options else ("--backend", "rachis")
    code, out, err = await output_of(
        *("-m", "command_line.main", "bench", "serve", "--address", target.address, *over_grpc),
        *("--num-prompts", "2", "--ready-check-timeout-sec", "1", *options),
    )
    assert (code in (1, 2), out) == (True, ""), err
    assert sentence in err
    assert "Traceback" not in err


@secured.for_open_services
async def test_vllms_benchmark_runs_as_it_is(gateway: str, tmp_path: Path) -> None:
    script = tmp_path / "benchmark.py"
    script.write_text(
        "import argparse; from vllm.benchmarks.serve import add_cli_args, main;"
        "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
    )
    result = tmp_path / "result.json"
    code, out, err = await output_of(
        *(str(script), "--backend", "openai", "--base-url", gateway, "--endpoint", "/v1/completions"),
        *("--dataset-name", "random", *SMALL, "--save-result", "--result-dir", str(tmp_path)),
        *("--result-filename", result.name),
    )
    assert code == 0, out + err
    found = json.loads(result.read_text())
    assert (found["completed"], found["failed"]) == (4, 0)
    assert found["total_output_tokens"] == 20
