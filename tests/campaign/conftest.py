"""Campaigns compute all the time, and `make test` leaves them what all others do not take: minutes for seconds."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What hangs in a campaign is found in simulated time, by the campaign itself."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(3600))
