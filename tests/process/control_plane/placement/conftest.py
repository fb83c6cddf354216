"""The cluster with an index that the modules of questions to the router share; test_replication.py does not ask."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.cluster import Cluster
from tests.fakes.indexed_cluster import indexed_cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with indexed_cluster() as cluster:
        yield cluster
