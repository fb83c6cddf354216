"""Reading logs beside other work: on a thread, one query after the other, and no more of them than a few at once."""

import asyncio

from cluster_core.errors import OverloadedError
from cluster_core.event_log import LogEvent
from cluster_core.log_files import LogQuery, ReadLogs, Told

# The one that is read, and those that wait for it.
MOST_QUERIES = 4
_RETRY_AFTER_MS = 1000


class LogReader:
    """read: called on a thread, which cannot be stopped: the turn is its, and its caller may leave."""

    def __init__(self, read: ReadLogs) -> None:
        self._read = read
        self._queries = 0
        self._turn = asyncio.Lock()

    async def read(self, query: LogQuery) -> Told[LogEvent]:
        """Raises OverloadedError."""
        if self._queries >= MOST_QUERIES:
            raise OverloadedError(
                f"{self._queries} queries of logs are read here or wait for it, more are not taken",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._queries += 1
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            self._queries -= 1
            raise
        reading = asyncio.ensure_future(asyncio.to_thread(self._read, query))
        reading.add_done_callback(self._ended)
        return await asyncio.shield(reading)

    def _ended(self, reading: asyncio.Future[Told[LogEvent]]) -> None:
        self._turn.release()
        self._queries -= 1
        if not reading.cancelled():
            # Whoever has asked may have left before it failed.
            reading.exception()
