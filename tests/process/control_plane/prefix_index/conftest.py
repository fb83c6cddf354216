"""The follower of workers in memory that the modules here share."""

import pytest

from tests.process.control_plane.prefix_index.followed_index import Followed


@pytest.fixture
def followed() -> Followed:
    return Followed()
