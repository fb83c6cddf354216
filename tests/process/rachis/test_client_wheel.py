"""The client's own wheel: what is in it, and that it needs grpcio and protobuf only."""

import asyncio
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import google.protobuf
import grpc
import pytest

from tests import ROOT
from tests.fakes.answers import whole_text
from tests.fakes.cluster import Cluster

_SCRIPT = """
import sys
sys.path[:0] = {folders!r}
import rachis
with rachis.Client({address!r}) as client:
    print(client.generate("hello", temperature=0.0, max_tokens=8).text, end="")
    assert client.is_serving(5.0)
known = {{name.partition(".")[0] for name in sys.modules}} - sys.stdlib_module_names
foreign = {{name for name in known if "site-packages" in str(getattr(sys.modules[name], "__file__", ""))}}
assert foreign <= {{"rachis", "grpc", "google", "typing_extensions"}}, foreign
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "protos", folder / "protos", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(folder), str(folder / "protos")], check=True, capture_output=True)
    (found,) = folder.glob("rachis_client-*.whl")
    return found


def test_the_wheel_has_the_client_with_its_types_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"rachis"}
    assert {"rachis/py.typed", "rachis/v1/generation_pb2.pyi", "rachis/v1/router.proto"} <= set(names)


def test_both_wheels_have_one_version() -> None:
    both = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in (ROOT, ROOT / "protos")]
    assert both[0]["version"] == both[1]["version"]


async def test_the_client_runs_beside_grpcio_and_protobuf_alone(wheel: Path, cluster: Cluster, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "client")
    needed = tmp_path / "site-packages"
    (needed / "google").mkdir(parents=True)
    installed = Path(grpc.__file__).parent
    (needed / "grpc").symlink_to(installed)
    (needed / "google" / "protobuf").symlink_to(Path(google.protobuf.__file__).parent)
    for each in [*installed.parent.glob("google/_upb*"), *installed.parent.glob("typing_extensions.py")]:
        (needed / each.relative_to(installed.parent)).symlink_to(each)
    script = _SCRIPT.format(folders=[str(tmp_path / "client"), str(needed)], address=cluster.router.address)
    cluster.calls += 1
    ran = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout) == (0, whole_text(8)), ran.stderr
