"""What all tests share: how many examples Hypothesis tries, and what the garbage collector leaves alone."""

import gc

from tests import examples

examples.load()


def pytest_collection_finish() -> None:
    """All modules and tests live to the end: a full collection need not walk them each time."""
    gc.collect()
    gc.freeze()
