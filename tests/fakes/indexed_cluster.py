"""The cluster over fake engines with an index that knows what they hold: claims go to it at once, not through Redis."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import numpy as np
import pytest
from rachis.v1 import worker_pb2 as wire
from rachis.wire import Context

from cluster_core.clock import unix_ms
from cluster_core.engine_reports import PrefixClaimChange
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.blocks import Tier
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys, chunk_keys, root_key
from tests.fakes.cluster import DECODE, PREFILL, Cluster, Worker, running_cluster
from worker_runtime.service import WorkerServiceBase
from worker_runtime.wire_conversion import claims_to_wire

CHUNK = 32
SERVICE = "svc-test"
PROMPT = "a prompt of two hundred tokens, which begins like many others do. " * 3


@asynccontextmanager
async def indexed_cluster(monkeypatch: pytest.MonkeyPatch, workers: int = 2) -> AsyncIterator[Cluster]:
    """So many prefill workers and a decode worker. Checks of the index wait for a twentieth of a second."""
    monkeypatch.setattr(WorkerServiceBase, "GetPrefixClaims", _look)
    flags = {
        "index__chunk_tokens": CHUNK,
        "placement__disaggregation": "conditional",
        "placement__local_prefill_tokens": 0,
    }
    async with running_cluster(monkeypatch, **flags) as cluster:
        monkeypatch.setattr(cluster.router._check, "_settle_s", 0.05)
        monkeypatch.setattr(cluster.router._check, "_between_s", 0.001)
        for pool in (*[PREFILL] * workers, DECODE):
            await _add(cluster, pool)
        yield cluster


def index_of(cluster: Cluster) -> PrefixIndex:
    index: PrefixIndex = cluster.router._prefixes.index
    return index


def keys_of(text: str, salt: str = "") -> Keys:
    return chunk_keys(list(text.encode()), root_key(SERVICE, salt), CHUNK)


def cache(worker: Worker, text: str, salt: str = "", tier: Tier = Tier.DEVICE) -> None:
    """The engine has this prompt now."""
    worker.engine.claims.cache(list(text.encode()), salt, tier)


def access(cluster: Cluster, text: str, times: int = 1) -> None:
    """So many requests have asked for it just now."""
    for _ in range(times):
        index_of(cluster).accessed(keys_of(text), unix_ms() / 1000)


async def _add(cluster: Cluster, pool: wire.Pool.ValueType) -> None:
    worker = await cluster.add(pool, chunk_tokens=CHUNK, service_id=SERVICE)
    index = index_of(cluster)
    index.join(worker.name, worker.record.generation)
    worker.engine.follow_claims(lambda change: index.apply(worker.name, _batch(change)))


def _batch(change: PrefixClaimChange) -> ClaimChange:
    def those(states: Mapping[int, bool], wanted: bool) -> Keys:
        return np.array([key for key, state in states.items() if state is wanted], dtype=np.uint64)

    return ClaimChange(
        those(change.device, True), those(change.device, False), those(change.host, True), those(change.host, False)
    )


async def _look(
    service: WorkerServiceBase, _request: wire.GetPrefixClaimsRequest, _context: Context
) -> wire.GetPrefixClaimsResponse:
    claims = await service._engine.prefix_claims()
    return claims_to_wire(service._registration.generation, 1, claims)
