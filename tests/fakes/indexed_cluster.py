"""The cluster over fake engines with an index that knows what they hold: claims go to it at once, not through Redis."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import unix_ms
from cluster_core.engine_reports import PrefixClaimChange, PrefixClaims
from control_plane.prefix_index.index import PrefixIndex
from control_plane.server.composition import RouterTiming
from kv_transfer.blocks import Tier
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys, chunk_keys, root_key
from tests.fakes.cluster import DECODE, PREFILL, SERVICE, Cluster, Worker, running_cluster
from worker_runtime.claim_feed import ClaimSource

CHUNK = 32
PROMPT = "a prompt of two hundred tokens, which begins like many others do. " * 3


@asynccontextmanager
async def indexed_cluster(workers: int = 2) -> AsyncIterator[Cluster]:
    """So many prefill workers and a decode worker. Checks of the index wait for a twentieth of a second."""
    flags: dict[str, Any] = {
        "index__chunk_tokens": CHUNK,
        "placement__disaggregation": "conditional",
        "placement__local_prefill_tokens": 0,
    }
    timing = RouterTiming(check_settle_s=0.05, check_between_s=0.001)
    async with running_cluster(timing=timing, **flags) as cluster:
        for pool in (*[PREFILL] * workers, DECODE):
            await _add(cluster, pool)
        yield cluster


def index_of(cluster: Cluster) -> PrefixIndex:
    return cluster.parts.prefixes.index


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
    worker = await cluster.add(pool, claim_feed=_AtOnce(), chunk_tokens=CHUNK, service_id=SERVICE)
    index = index_of(cluster)
    index.join(worker.name, worker.record.generation)
    worker.engine.follow_claims(lambda change: index.apply(worker.name, _batch(change)))


class _AtOnce:
    """The index has every change at once, so that what the engine has is what it has told of."""

    async def audit(self, engine: ClaimSource) -> tuple[int, PrefixClaims]:
        return 1, await engine.prefix_claims()


def _batch(change: PrefixClaimChange) -> ClaimChange:
    def those(states: Mapping[int, bool], wanted: bool) -> Keys:
        return np.array([key for key, state in states.items() if state is wanted], dtype=np.uint64)

    return ClaimChange(
        those(change.device, True), those(change.device, False), those(change.host, True), those(change.host, False)
    )
