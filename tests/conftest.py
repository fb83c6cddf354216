"""Which tests run on one worker when they are spread over several, in which order, and what each tier took.

A group stays on one worker: what its tests share is started once. The tests of a folder below tests/integration are a
group, those that fork engines are one, and those of any other file. What takes longest comes first, so that at the end
no worker is left alone with it; what mostly waits runs beside what computes. Also: how many examples Hypothesis tries,
and what the garbage collector leaves alone.
"""

import gc
from collections import defaultdict
from pathlib import Path, PurePath

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import ROOT, examples

examples.load()

# Their engines are forked from a server that each worker would have to start for itself (`tests.engine_process`).
_ENGINE_PROCESSES = frozenset(
    f"tests/{name}.py"
    for name in (
        "campaign/fuzz/test_session_fuzz", "integration/test_block_events", "integration/test_decode_engine",
        "integration/test_handoff", "integration/test_tiers_bench", "integration/test_tiers_on_the_engine",
    )
)  # fmt: skip
_LONGEST_FIRST = (
    "tests/integration/two_by_two", "engine processes", "tests/integration/test_alerts.py", "tests/integration/shared",
    "tests/process", "tests/integration", "tests/contract", "tests/campaign", "tests/pure",
)  # fmt: skip


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """pytest-xdist 3.8 marks groups in names of tests that pytest 9.2 forgets: here the path alone says the group."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(PurePath(nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> GroupScheduling:
    return GroupScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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


def _group(file: PurePath) -> str:
    if file.as_posix() in _ENGINE_PROCESSES:
        return "engine processes"
    is_shared = file.parts[:2] == ("tests", "integration") and len(file.parts) > 3
    return (file.parent if is_shared else file).as_posix()


def _place(item: pytest.Item) -> tuple[int, bool]:
    """Items of one place stay in the order of their files, and in a file in its own."""
    group = _group(item.path.relative_to(ROOT))
    place = next((place for place, start in enumerate(_LONGEST_FIRST) if group.startswith(start)), 0)
    return place, item.get_closest_marker("leaves_less") is not None
