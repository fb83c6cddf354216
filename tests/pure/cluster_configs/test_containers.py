"""What is said of containers holds: their health checks, and each `docker run` that is documented."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_configs.exposure import check_exposure
from cluster_configs.loading import load, parse_assignments
from tests import ROOT
from tests.command import command_tree
from tools.release import layers

CONTAINER_FILE = ROOT / "cluster_configs/containers/Dockerfile"


def documented_runs() -> Iterator[tuple[str, ...]]:
    """The words of each, once."""
    pages = (CONTAINER_FILE, ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    text = "\n".join(re.sub(r"\\\n\s*", "", page.read_text()) for page in pages)
    found = re.findall(r"^[#\s$]*(docker run .*rachis:.*)$", text, re.MULTILINE)
    yield from dict.fromkeys(tuple(shlex.split(line)) for line in found)


def split(run: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """What Docker is told, and what `rachis` is told in the container."""
    image = next(index for index, word in enumerate(run) if word.startswith("rachis:"))
    return list(run[:image]), list(run[image + 1 :])


def given(words: list[str], option: str) -> list[str]:
    return [words[index + 1] for index, word in enumerate(words) if word == option]


def test_images_are_healthy_when_they_take_requests() -> None:
    lines = CONTAINER_FILE.read_text().splitlines()
    checks = [line.partition(" CMD ")[2] for line in lines if line.startswith("HEALTHCHECK")]
    assert [json.loads(check) for check in checks] == [["rachis", "status", "--ready"]] * 2


@pytest.mark.parametrize("run", documented_runs(), ids=lambda run: split(run)[1][0])
def test_a_documented_container_runs_a_command_that_there_is_on_files_that_are_mounted(run: tuple[str, ...]) -> None:
    docker, words = split(run)
    command = command_tree()
    while commands := getattr(command, "commands", None):
        command = commands[words.pop(0)]
    # As the command line is parsed; nothing is run.
    command.make_context("rachis", list(words))
    mounts = [Path(volume.split(":")[1]) for volume in given(docker, "--volume")]
    for path in re.findall(r"(?:^|=)(/\S+)", "\n".join(words), re.MULTILINE):
        assert any(Path(path).is_relative_to(mount) for mount in mounts), f"{path} is in no volume"
    for mount in mounts:
        assert any(line.endswith(f"--owner rachis --mode 0700 {mount}") for line in layers(_file(), "gpu")), mount


def test_a_documented_service_starts_with_what_it_is_told() -> None:
    services = [words for _, words in map(split, documented_runs()) if words[0] == "serve"]
    assert services
    for words in services:
        [profile] = given(words, "--profile")
        check_exposure(load(profile=profile, flags=parse_assignments(given(words, "--set"))).config)


def _file() -> str:
    return CONTAINER_FILE.read_text()
