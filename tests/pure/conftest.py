"""Whatever lies under this folder is pure: see `guard`."""

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.pure.guard import HEAVY, only_pure

_HERE = Path(__file__).parent


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where nothing else is run, no module has imported what takes seconds."""
    heavy = HEAVY & sys.modules.keys()
    if heavy and all(item.path.is_relative_to(_HERE) for item in session.items):
        raise pytest.UsageError(f"some module under tests/pure/ imports {', '.join(sorted(heavy))}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    with only_pure():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    with only_pure():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    with only_pure():
        yield
