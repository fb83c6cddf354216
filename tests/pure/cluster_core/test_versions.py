"""Which versions work together."""

import importlib.metadata

import pytest

from cluster_core.versions import Versions, differences, installed

HERE = Versions("0.7.2", "0.32.0", "1.5.1")


def test_what_runs_here_is_found() -> None:
    found = installed()
    assert found.rachis == importlib.metadata.version("rachis")
    assert found.vllm and found.nixl
    assert str(found) == f"Rachis {found.rachis}, vLLM {found.vllm}, NIXL {found.nixl}"


@pytest.mark.parametrize(
    "there",
    [
        HERE,
        Versions("0.7.9", "0.32.0", "1.5.1"),
        Versions("0.7.2", "0.32.0+cu129", "1.5.1"),
        Versions(),
        Versions(rachis="0.7.0"),
    ],
)
def test_these_work_together(there: Versions) -> None:
    assert differences(HERE, "a", there, "b") == []
    assert differences(there, "b", HERE, "a") == []


@pytest.mark.parametrize(
    ("there", "told"),
    [
        (Versions("0.8.0", "0.32.0", "1.5.1"), ["Rachis is 0.7.2 on a and 0.8.0 on b"]),
        (Versions("1.7.2", "0.32.0", "1.5.1"), ["Rachis is 0.7.2 on a and 1.7.2 on b"]),
        (
            Versions("0.7.2", "0.32.1", "1.5.0"),
            ["vLLM is 0.32.0 on a and 0.32.1 on b", "NIXL is 1.5.1 on a and 1.5.0 on b"],
        ),
    ],
)
def test_these_do_not_and_both_are_named(there: Versions, told: list[str]) -> None:
    assert differences(HERE, "a", there, "b") == told
