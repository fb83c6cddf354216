"""What passes between a router and a worker: a relay of TCP that writes all of it down, and can break off."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_CHUNK_BYTES = 1 << 16


class Wiretap:
    """Relays connections to `target`. passed: both ways, of all connections."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._server: asyncio.Server
        self._writers: list[asyncio.StreamWriter] = []
        self._relays: set[asyncio.Task[None]] = set()
        self.passed = bytearray()
        self.connections = 0

    async def start(self) -> str:
        """Its address."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def break_off(self, *, resets: bool) -> None:
        """As the kernel does for a process that was killed: it says an end or, where something was unread, a reset.
        Nobody is let in any more."""
        self._server.close()
        for writer in self._writers:
            if resets:
                own: socket.socket = writer.get_extra_info("socket")
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        for relay in list(self._relays):
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        self.connections += 1
        there, to_there = await asyncio.open_connection(host, int(port))
        self._writers += [writer, to_there]
        for source, target in ((reader, to_there), (there, writer)):
            relay = asyncio.create_task(self._relay(source, target))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)

    async def _relay(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(_CHUNK_BYTES):
                self.passed += data
                target.write(data)
                await target.drain()
        except OSError:
            # The other end says so, too.
            return
        finally:
            target.close()


@asynccontextmanager
async def tapped(target: str) -> AsyncIterator[tuple[Wiretap, str]]:
    """(the relay, its address)"""
    tap = Wiretap(target)
    address = await tap.start()
    try:
        yield tap, address
    finally:
        await tap.break_off(resets=False)
