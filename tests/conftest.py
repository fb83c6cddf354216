"""The order and the groups of all tests (`tests.groups`), what each tier took, how many examples Hypothesis tries, and
what the garbage collector leaves alone."""

import gc
import os
from collections import defaultdict
from pathlib import Path, PurePath

import pytest
from xdist.scheduler import LoadScopeScheduling

# Before a test module loads torch, which reads it once: beside other tests, threads of one engine wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# As commands have it (`command_line`): in children that tests start while gRPC's threads run its handlers would crash.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Workers of pytest-xdist have the size of a terminal that is not there, and Rich keeps what it finds at its import.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

from tests import ROOT, examples
from tests.groups import group_of, place_of

examples.load()


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """pytest-xdist 3.8 marks groups in names of tests that pytest 9.2 forgets: here the path alone says the group."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(PurePath(nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> GroupScheduling:
    return GroupScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


# All modules and tests live to the end: nothing is looked through for garbage before they are there.
gc.disable()


def pytest_collection_finish() -> None:
    """No collection need walk through what is there by now."""
    gc.collect()
    gc.freeze()
    gc.enable()


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
    return place_of(item.path.relative_to(ROOT)), item.get_closest_marker("leaves_less") is not None
