"""`rachis bench feather`, tiny: real engines, the same tokens under every policy."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.integration
TIMEOUT_S = 600


def test_figures_of_every_policy() -> None:
    command = [
        sys.executable, "-m", "command_line.main", "bench", "feather", "--json", "--rounds", "1", "--seconds", "1",
        "--shared-tokens", "1000", "--policy", "heuristic", "--policy", "bandit",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert set(told["policies"]) == {"fcfs", "fcfs_ordered", "heuristic", "bandit"}
    for figures in told["policies"].values():
        assert figures["throughput_tok_s"] > 0
        assert 0 < figures["tbt_p50_ms"] <= figures["tbt_p99_ms"]
        assert 0 < figures["mean_batch"] <= told["workload"]["places"]
        assert figures["speedup_vs_fcfs"] > 0
        assert figures["share_of_ceiling"] > 0
    for name in ("heuristic", "bandit"):
        assert sum(told["policies"][name]["admissions"].values()) > 0
        assert 0 < told["policies"][name]["scheduler_cpu_share"] < 1
    assert told["policies"]["fcfs"]["scheduler_cpu_share"] == 0
    assert set(told["no_sharing"]) == set(told["one_group"]) == set(told["policies"])
    assert told["vllm"]["throughput_tok_s"] > 0
