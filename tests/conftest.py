"""Which tests run on one worker when they are spread over several, in which order, and what each tier took.

A group stays on one worker: what its tests share is started once. Groups come in the order of `_LONGEST_FIRST`, so
that the last ones that run are short. A test file without a group of its own is one.
"""

from collections import defaultdict
from pathlib import Path

import pytest

from tests import ROOT

# What an item of these folders or files needs takes longest to start or to do.
_LONGEST_FIRST = ("tests/integration", "tests/contract", "tests/campaign", "tests/process", "tests/pure")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_file(item)))
    items.sort(key=_rank)


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


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def _rank(item: pytest.Item) -> int:
    return next((place for place, start in enumerate(_LONGEST_FIRST) if _file(item).startswith(start)), 0)
