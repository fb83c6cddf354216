"""The shipped alert rules, and a real Prometheus to run them: one on the PATH, or Debian's package, not installed."""

import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

RULE_FILES = sorted((ROOT / "cluster_configs" / "alerts").glob("*.yaml"))

_PACKAGE = "prometheus"
_APT_TIMEOUT_S = 120


@functools.cache
def rule_groups() -> list[dict[str, Any]]:
    """Of all rule files."""
    return [group for file in RULE_FILES for group in yaml.safe_load(file.read_text())["groups"]]


def alert_rules() -> dict[str, dict[str, Any]]:
    """All alerts by name; recording rules are left out."""
    return {rule["alert"]: rule for group in rule_groups() for rule in group["rules"] if "alert" in rule}


@functools.cache
def binary(name: str) -> str:
    """`prometheus` or `promtool`. Skips the test where it cannot be had, and says why."""
    on_path = shutil.which(name)
    if on_path:
        return on_path
    folder = Path(tempfile.gettempdir()) / f"rachis-{_PACKAGE}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unpacked = folder / "usr" / "bin" / name
        if not unpacked.exists():
            _unpack(folder)
    return str(unpacked)


def _unpack(folder: Path) -> None:
    """Debian's package into `folder`, without its dependencies: both binaries are static."""
    try:
        package = _downloaded(folder)
        if package is None:
            _run(["apt-get", "update", "--quiet"], folder)
            package = _downloaded(folder)
        if package is None:
            pytest.skip(f"there is no {_PACKAGE} on the PATH, and apt-get cannot fetch the package of that name")
        _run(["dpkg-deb", "--extract", str(package), str(folder)], folder)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"there is no {_PACKAGE} on the PATH, and Debian's package cannot be had: {error}")


def _downloaded(folder: Path) -> Path | None:
    """None: apt knows no such package, or cannot fetch the one that it knows."""
    command = ["apt-get", "download", "--quiet", _PACKAGE]
    subprocess.run(command, cwd=folder, timeout=_APT_TIMEOUT_S, check=False, capture_output=True)
    return next(folder.glob(f"{_PACKAGE}_*.deb"), None)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, timeout=_APT_TIMEOUT_S, check=True, capture_output=True)
