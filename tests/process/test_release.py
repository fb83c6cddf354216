"""The wheel of the service is whole. It is what an image has, and nobody tries it while developing."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tools.release import build_wheel

COMMITTED_UNIX_S = 1_800_000_000
# By path alone, and by nobody but people.
_NOT_READ = ("benchmarks/results/", "benchmarks/scenarios/")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git knows."""
    source, target = (tmp_path_factory.mktemp(what) for what in ("source", "wheel"))
    for name in _tracked():
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build_wheel(source, target, COMMITTED_UNIX_S)
    (found,) = target.glob("rachis-*.whl")
    return found


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.rstrip("\0").split("\0")


def test_every_module_and_every_file_that_is_read_is_in_the_wheel(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packages = {name.partition("/")[0] for name in inside}
    own = {name.removeprefix("protos/") for name in _tracked()}
    left_out = {name for name in own - inside if name.partition("/")[0] in packages and not name.startswith(_NOT_READ)}
    assert {name for name in left_out if not name.endswith((".md", ".proto"))} == set()


def test_the_command_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = "import command_line.main as main, sys; sys.argv = ['rachis', 'config', 'show', '--json']; main.run()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert '"router.port"' in ran.stdout
