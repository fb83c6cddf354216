"""What servers and clients of the wire share."""

import grpc
import pytest
from rachis import conventions


async def test_two_servers_never_share_a_port() -> None:
    first, second = (grpc.aio.server(options=conventions.channel_options(1 << 20)) for _ in range(2))
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()

    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")

    await first.stop(0)
    await second.stop(0)
