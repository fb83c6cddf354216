"""Whatever lies under this folder is pure: see `guard`."""

from collections.abc import Generator

import pytest

from tests.pure.guard import only_pure


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
