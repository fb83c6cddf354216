"""What the check of the tree's shape says of tests that go past the ports."""

from pathlib import Path

import pytest

from tools.structure import module_of, unexplained

HEAD = '''"""A test."""

import os
from typing import Any, cast
import ray
from vllm.v1.request import Request
from kv_transfer.tiers import report
from rachis import client

'''
FIRST_LINE = HEAD.count("\n") + 1


def lines(text: str, name: str = "test_part.py") -> list[int]:
    """Those of the text that want a reason."""
    found = unexplained(module_of(Path("tests/pure") / name, HEAD + text))
    return [int(each.split(":")[1]) - FIRST_LINE + 1 for each in found]


@pytest.mark.parametrize(
    "text",
    [
        'monkeypatch.setattr(report, "MOST_RUNS", 2)',
        'monkeypatch.setattr("kv_transfer.tiers.report.MOST_RUNS", 2)',
        'monkeypatch.setattr("rachis.routers.KEPT_BYTES", 2)',
        'monkeypatch.setitem(report.NAMES, "a", 2)',
        'monkeypatch.delattr(report.Part, "name")',
        'patched.setattr(report, "MOST_RUNS", 2)',
        'with mock.patch.object(report, "MOST_RUNS", 2): pass',
        'with mock.patch("kv_transfer.tiers.report.MOST_RUNS", 2): pass',
        "assert report._known == 1",
        "assert part.inner._known == 1",
        "part._known = 1",
        "client.session()._outbox.add(1)",
        "cast(Any, part)._known = 1",
        "part._known = 1  # type: ignore[assignment]",
        "part.known = noted  # type: ignore[method-assign]",
        "part._known = 1  # noqa: SLF001",
    ],
)
def test_a_patch_and_a_private_name_without_a_reason_are_found(text: str) -> None:
    assert lines(text) == [1]


@pytest.mark.parametrize(
    "text",
    [
        "os._exit(1)",
        'monkeypatch.setattr(ray, "init", None)',
        'monkeypatch.setattr("sys.argv", [])',
        'monkeypatch.setattr(Request, "status", None)',
        "Request._all_token_ids",
        'monkeypatch.setenv("COLUMNS", "300")',
        "self._jobs = super()._jobs + cls._jobs",
        "record._replace(address=1)._asdict()",
        "part.__dict__",
        'setattr(part, "known", 1)',
    ],
)
def test_what_belongs_to_others_or_to_the_test_itself_needs_no_reason(text: str) -> None:
    assert lines(text) == []


def test_a_reason_stands_in_the_line_or_right_above() -> None:
    assert lines("part._known = 1  # A defect of our own has no port.") == []
    assert lines("# A defect of our own has no port.\npart._known = 1") == []
    assert lines("part._known = 1  # type: ignore[assignment]  # no port") == []
    assert lines('monkeypatch.setattr(\n    report,\n    "MOST_RUNS",  # as on a small host\n    2,\n)') == []
    assert lines("# A reason, of something else.\n\npart._known = 1") == [3]
    assert lines("first = 1  # A reason, of something else.\npart._known = 1") == [2]


def test_one_reason_is_enough_for_lines_that_follow_each_other() -> None:
    reads = "assert not part._known\nassert not part._begun\n"
    assert lines(f"# Nothing is left.\n{reads}") == []
    assert lines(reads) == [1, 2]
    assert lines(f"# Nothing is left.\n{reads}other = 1\n{reads}") == [5, 6]


@pytest.mark.parametrize("name", ["planted.py", "planted_decode.py", "planting.py", "test_vllm_private_scheduler.py"])
def test_who_plants_bugs_or_guards_private_names_by_trade_needs_no_reason(name: str) -> None:
    assert lines('monkeypatch.setattr(report, "_known", 2)\npart._known = 1', name) == []
    assert lines("part._known = 1", f"not_{name}") == [1]
