"""A Redis that is not there."""

import pytest

from cluster_core.ports import hold_port
from cluster_wire.redis_client import REDIS_DOWN, connect


@pytest.mark.parametrize("kind", ["redis", "redis+cluster"])
async def test_a_redis_that_is_not_there_is_down(kind: str) -> None:
    client = connect(f"{kind}://127.0.0.1:{hold_port('127.0.0.1')}/0", timeout_s=0.5)

    with pytest.raises(REDIS_DOWN):
        await client.get("key")
    await client.aclose()
