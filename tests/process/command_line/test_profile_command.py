"""`rachis profile`, without the measurement."""

from pathlib import Path
from typing import Any

import pytest

from cluster_configs.preemption_costs import default_model
from command_line import profile_run
from tests.command import rachis


def test_what_it_says_to_set_is_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(_module: str, arguments: dict[str, Any], _reports: object) -> None:
        default_model("cpu").save(Path(arguments["output"]))

    # It starts an engine, and takes minutes.
    monkeypatch.setattr(profile_run, "measure_in_process", measured)
    # It loads a library that draws.
    monkeypatch.setattr(profile_run, "save_plot", lambda model, path: None)
    monkeypatch.chdir(tmp_path)
    answered = rachis("profile", "--output", "cost.json")
    assert answered.exit_code == 0, answered.stderr
    assert f"streaming.cost_profile={tmp_path}/cost.json" in answered.stdout.replace("\n", "")
