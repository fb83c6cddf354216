"""A router's prefix index, with what keeps it in step with the cluster: claims of workers, accesses of all routers."""

import secrets
from collections.abc import Callable

from cluster_configs.schema import RachisConfig
from cluster_core.clock import ClusterClock, monotonic_s
from cluster_wire.redis_client import RedisClient
from control_plane.fleet.membership import Membership
from control_plane.prefix_index.access_log import AccessLog
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import IndexFollower


def whole_blocks(tokens: int, block_tokens: int) -> int:
    """So many tokens, rounded up to whole blocks."""
    return -(-tokens // block_tokens) * block_tokens


class FollowedIndex:
    """`claims` and `accesses` are to be followed; `close` once."""

    def __init__(
        self,
        config: RachisConfig,
        redis: Callable[[], RedisClient],
        service_id: str,
        membership: Membership,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        """redis: makes a client; claims and accesses have one each."""
        section = config.index
        chunk_tokens = whole_blocks(section.chunk_tokens, config.engine.block_size_tokens)
        # Another one with each start.
        self.router_id = secrets.token_hex(8)
        clock = ClusterClock(now_s=now_s)
        self.index = PrefixIndex(section.max_entries, section.half_life_s, clock.unix_s())
        self.claims = IndexFollower(
            redis(),
            service_id,
            membership,
            self.index,
            section,
            is_fit=lambda block_tokens: whole_blocks(section.chunk_tokens, block_tokens) == chunk_tokens,
            now_s=now_s,
        )
        # A prompt that a worker has computed is a reason to look for claims, too.
        self.accesses = AccessLog(
            redis(), service_id, self.index, section, router_id=self.router_id, clock=clock, pause=self.claims.pause
        )

    async def close(self) -> None:
        await self.claims.close()
        await self.accesses.close()
