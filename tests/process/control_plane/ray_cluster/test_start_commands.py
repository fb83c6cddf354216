"""What the shipped files for `ray up` have each host run, with a Ray that is late."""

import os
import subprocess
from pathlib import Path

import pytest

from control_plane.ray_cluster import cluster_file
from tests import ROOT

# The first starts fail, as many as RAY_IS_LATE says.
RAY = """#!/bin/bash
echo "$1" >> "$CALLS"
[ "$1" = stop ] || [ "$(grep -c start "$CALLS")" -gt "$RAY_IS_LATE" ]
"""


@pytest.mark.parametrize("name", ["onprem", "aws", "gcp"])
@pytest.mark.parametrize(
    ("late", "status", "calls"),
    [(0, 0, "start"), (2, 0, "start stop start stop start"), (3, 1, "start stop start stop start stop")],
)
def test_a_ray_that_a_busy_host_has_kept_from_starting_is_started_again(
    name: str, late: int, status: int, calls: str, tmp_path: Path
) -> None:
    """Ray's autoscaler does not come back to a host of one's own where that has failed once."""
    *_, command = cluster_file.read(ROOT / "cluster_configs" / "ray" / f"{name}.yaml")["worker_start_ray_commands"]
    program, said = tmp_path / "ray", tmp_path / "calls"
    program.write_text(RAY)
    program.chmod(0o755)
    told = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(said), "RAY_IS_LATE": str(late)}

    ended = subprocess.run(["bash", "-c", f"({command})"], env=os.environ | told, capture_output=True, check=False)

    assert (ended.returncode, said.read_text().split()) == (status, calls.split())
