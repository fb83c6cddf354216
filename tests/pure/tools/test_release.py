"""What a release is made from, and what is refused."""

import pytest

from tests import ROOT
from tools.release import ReleaseError, changes_of, check_committed, layers, version_of

CHANGELOG = """# Changelog

## [0.2.0] - Unreleased

### What you have to do

- Nothing.

### Fixed

- A defect.

## [0.1.0] - 2026-01-01

### Added
"""
CONTAINER_FILE = """FROM python:3 AS base
RUN useradd somebody
FROM base AS cpu
COPY a b
RUN one \\
    && two
USER 1
FROM base AS gpu
RUN three
"""


def test_the_version_is_the_modules() -> None:
    assert version_of('x = 1\n__version__ = "1.2.3rc4"\n') == "1.2.3rc4"
    with pytest.raises(ReleaseError, match="no __version__"):
        version_of('__version__ = "1.2"\n')


def test_the_changes_are_the_section_of_the_version_alone() -> None:
    changes = changes_of(CHANGELOG, "0.2.0")
    assert changes.startswith("## [0.2.0]") and changes.endswith("- A defect.\n")


@pytest.mark.parametrize(("version", "why"), [("0.3.0", "no section"), ("0.1.0", "What you have to do")])
def test_a_version_that_does_not_say_what_it_asks_is_refused(version: str, why: str) -> None:
    with pytest.raises(ReleaseError, match=why):
        changes_of(CHANGELOG, version)


def test_layers_of_an_image_begin_with_those_that_it_stands_on() -> None:
    assert layers(CONTAINER_FILE, "cpu") == ["RUN useradd somebody", "COPY a b", "RUN one && two"]
    assert layers(CONTAINER_FILE, "gpu") == ["RUN useradd somebody", "RUN three"]
    with pytest.raises(ReleaseError, match="no target `tpu`"):
        layers(CONTAINER_FILE, "tpu")


def test_the_next_release_has_what_it_needs() -> None:
    version = version_of((ROOT / "protos/rachis/__init__.py").read_text())
    assert changes_of((ROOT / "CHANGELOG.md").read_text(), version)
    container_file = (ROOT / "cluster_configs/containers/Dockerfile").read_text()
    copied = {word for each in ("cpu", "gpu") for line in layers(container_file, each) for word in line.split()}
    assert {"cpu.lock", "gpu.lock", "torch-cpu.lock", "rachis-*.whl"} <= copied


def test_a_release_of_what_is_committed_is_made() -> None:
    check_committed("")


@pytest.mark.parametrize(
    ("status", "named"),
    [
        (" M README.md", "README.md"),
        ("?? a.py\nD  b.py", "a.py, b.py"),
        ("\n".join(f"?? {number}" for number in range(7)), "0, 1, 2, 3, 4 and 2 more"),
    ],
)
def test_what_is_not_in_the_commit_is_named(status: str, named: str) -> None:
    with pytest.raises(ReleaseError, match=f"these are not in it: {named}$"):
        check_committed(status)
