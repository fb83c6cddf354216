"""The cluster over fake engines that the test_router_*.py modules share; the other modules here do not ask for it."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster


@pytest.fixture
async def empty() -> AsyncIterator[Cluster]:
    async with running_cluster(handoff__deadline_s=1.0) as cluster:
        yield cluster


@pytest.fixture
async def cluster(empty: Cluster) -> Cluster:
    """One prefill and one decode worker."""
    await empty.add(PREFILL)
    await empty.add(DECODE)
    return empty


@pytest.fixture
async def cluster_2x2(empty: Cluster) -> Cluster:
    for pool in (PREFILL, PREFILL, DECODE, DECODE):
        await empty.add(pool)
    return empty
