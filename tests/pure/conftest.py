"""Whatever lies under this folder is pure: see `guard`.

That is looked at where nothing else runs in the process: what other tests have left behind there, say a service's
client that goes on in the background, would be taken for a pure test's doing.
"""

import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import pytest

from tests.pure.guard import HEAVY, only_pure, refusing

_HERE = Path(__file__).parent
_runs_alone = pytest.StashKey[bool]()
_to_the_end = ExitStack()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where nothing else is run, no module has imported what takes seconds."""
    runs_alone = session.config.stash[_runs_alone] = all(item.path.is_relative_to(_HERE) for item in session.items)
    heavy = HEAVY & sys.modules.keys()
    if runs_alone and heavy:
        raise pytest.UsageError(f"some module under tests/pure/ imports {', '.join(sorted(heavy))}")
    if runs_alone:
        _to_the_end.enter_context(refusing())


def pytest_sessionfinish() -> None:
    _to_the_end.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    with _guarded(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with _guarded(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    with _guarded(item):
        yield


def _guarded(item: pytest.Item) -> AbstractContextManager[None]:
    return only_pure() if item.config.stash[_runs_alone] else nullcontext()
