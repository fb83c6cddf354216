"""A router's prefix index, with what keeps it in step with the cluster: claims of workers, accesses of all routers."""

import asyncio
import secrets

from cluster_configs.schema import RachisConfig
from cluster_core.clock import unix_ms
from control_plane.fleet.membership import Membership
from control_plane.prefix_index.access_log import AccessLog
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import IndexFollower


def whole_blocks(tokens: int, block_tokens: int) -> int:
    """So many tokens, rounded up to whole blocks."""
    return -(-tokens // block_tokens) * block_tokens


class FollowedIndex:
    """`start` once, `close` once. router_id: another one with each start."""

    def __init__(self, config: RachisConfig, redis_url: str, service_id: str, membership: Membership) -> None:
        section = config.index
        chunk_tokens = whole_blocks(section.chunk_tokens, config.engine.block_size_tokens)
        self.router_id = secrets.token_hex(8)
        self.index = PrefixIndex(section.max_entries, section.half_life_s, unix_ms() / 1000)
        self.claims = IndexFollower(
            redis_url,
            service_id,
            membership,
            self.index,
            refresh_s=section.refresh_s,
            max_staleness_s=section.max_staleness_s,
            silent_after_s=section.silent_after_s,
            is_fit=lambda block_tokens: whole_blocks(section.chunk_tokens, block_tokens) == chunk_tokens,
        )
        self.accesses = AccessLog(
            redis_url,
            service_id,
            self.index,
            router_id=self.router_id,
            refresh_s=section.refresh_s,
            half_life_s=section.half_life_s,
        )

    def start(self) -> list[asyncio.Task[None]]:
        """Tasks that run until they are cancelled."""
        return [asyncio.create_task(self.claims.follow()), asyncio.create_task(self.accesses.follow())]

    async def close(self) -> None:
        await self.claims.close()
        await self.accesses.close()
