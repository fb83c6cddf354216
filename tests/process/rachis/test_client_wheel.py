"""The client's own wheel: what is in it, and that it needs grpcio and protobuf only."""

import asyncio
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import google.protobuf
import grpc
import pytest
import rachis

from tests import ROOT
from tests.fakes.answers import whole_text
from tests.fakes.cluster import Cluster
from tools.release import build_wheel

_SCRIPT = """
import sys
sys.path[:0] = {folders!r}
import rachis
with rachis.Client({address!r}) as client:
    print(client.generate("hello", temperature=0.0, max_tokens=8).text, end="")
    assert client.is_serving(5.0)
    assert client.identity().is_open
    assert client.models().HasField("model")
known = {{name.partition(".")[0] for name in sys.modules}} - sys.stdlib_module_names
foreign = {{name for name in known if "site-packages" in str(getattr(sys.modules[name], "__file__", ""))}}
assert foreign <= {{"rachis", "grpc", "google", "typing_extensions"}}, foreign
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two, each from a copy: building writes beside the sources."""
    found: list[Path] = []
    for number in range(2):
        folder = tmp_path_factory.mktemp(f"wheel-{number}")
        shutil.copytree(ROOT / "protos", folder / "protos", ignore=shutil.ignore_patterns("__pycache__"))
        build_wheel(folder / "protos", folder, committed_unix_s=1_800_000_000)
        found += folder.glob("rachis_client-*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(wheels: list[Path]) -> Path:
    return wheels[0]


def test_the_same_sources_give_the_same_bytes(wheels: list[Path]) -> None:
    one, other = (wheel.read_bytes() for wheel in wheels)
    assert one == other


def test_the_wheel_has_the_client_with_its_types_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"rachis"}
    assert {"rachis/py.typed", "rachis/v1/generation_pb2.pyi", "rachis/v1/router.proto"} <= set(names)


def test_the_wheel_has_the_version_of_the_service(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == rachis.__version__ == importlib.metadata.version("rachis")


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
