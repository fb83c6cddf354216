"""Which tests run on one worker when they are spread over several, in which order, and what each tier took.

A group stays on one worker: what its tests share is started once. A test file without a group of its own is one. The
groups and folders that take longest come first, so that at the end no worker is left alone with a long one. Also: how
many examples Hypothesis tries, and what the garbage collector leaves alone.
"""

import gc
from collections import defaultdict
from pathlib import Path

import pytest

from tests import ROOT, examples

examples.load()

_LONGEST_FIRST = (
    "two by two", "service", "tests/integration/test_alerts.py", "engine processes",
    "tests/integration", "tests/contract", "tests/campaign", "tests/process", "tests/pure",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(ROOT).as_posix()))
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """All modules and tests live to the end: a full collection need not walk them each time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each tier, where more than one ran: tests, and seconds of all workers together."""
    seconds: dict[str, float] = defaultdict(float)
    names: dict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tier = Path(report.nodeid).parts[1]
                seconds[tier] += report.duration
                names[tier].add(report.nodeid)
    terminalreporter.section("tiers")
    for tier, spent_s in sorted(seconds.items()):
        terminalreporter.write_line(f"{tier:<12} {len(names[tier]):>6} tests {spent_s:>8.1f} s")


def _place(item: pytest.Item) -> tuple[int, bool]:
    """Items of one place stay in the order of their files, and in a file in its own."""
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    place = next((place for place, start in enumerate(_LONGEST_FIRST) if mark.args[0].startswith(start)), 0)
    return place, item.get_closest_marker("leaves_less") is not None
