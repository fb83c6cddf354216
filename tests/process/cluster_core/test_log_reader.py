"""Logs are read one query after the other, of a few that are taken."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cluster_core.errors import OverloadedError
from cluster_core.event_log import LogEvent
from cluster_core.log_files import LogQuery, Told
from cluster_core.log_reader import MOST_QUERIES, LogReader

QUERY = LogQuery()


class Disk:
    """Reads nothing until `go_on`."""

    def __init__(self) -> None:
        self.began = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.reading = 0
        self.most_reading = 0
        self.read_queries = 0

    def read(self, query: LogQuery) -> Told[LogEvent]:
        self.reading += 1
        self.most_reading = max(self.most_reading, self.reading)
        self.began.release()
        assert self.go_on.wait(60)
        self.reading -= 1
        self.read_queries += 1
        return Told(())


async def begun(disk: Disk) -> None:
    assert await asyncio.to_thread(disk.began.acquire, timeout=60)


async def test_one_query_is_read_at_a_time_and_one_too_many_is_refused_with_a_sentence() -> None:
    disk = Disk()
    reader = LogReader(disk.read)
    queries = [asyncio.create_task(reader.read(QUERY)) for _ in range(MOST_QUERIES)]
    await begun(disk)
    with pytest.raises(OverloadedError, match="4 queries of logs are read here or wait for it") as refused:
        await reader.read(QUERY)
    assert refused.value.status == "RESOURCE_EXHAUSTED" and refused.value.retry_after_ms
    disk.go_on.set()
    await asyncio.gather(*queries)
    assert (disk.most_reading, disk.read_queries) == (1, MOST_QUERIES)
    assert await reader.read(QUERY) == Told(())


async def test_whoever_leaves_does_so_at_once_and_the_thread_keeps_the_turn_until_it_has_read() -> None:
    disk = Disk()
    reader = LogReader(disk.read)
    reads = asyncio.create_task(reader.read(QUERY))
    await begun(disk)
    waits = asyncio.create_task(reader.read(QUERY))
    stays = asyncio.create_task(reader.read(QUERY))
    await asyncio.sleep(0)
    for leaves in (waits, reads):
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
    assert disk.reading == 1 and not stays.done()
    others = [asyncio.create_task(reader.read(QUERY)) for _ in range(MOST_QUERIES - 2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await reader.read(QUERY)
    disk.go_on.set()
    assert await asyncio.gather(stays, *others) == [Told(())] * (MOST_QUERIES - 1)
    assert (disk.most_reading, disk.read_queries) == (1, MOST_QUERIES)


async def test_a_read_that_fails_gives_the_turn_to_the_next_one() -> None:
    answers: Iterator[OSError | Told[LogEvent]] = iter([OSError("the disk"), Told(())])

    def read(query: LogQuery) -> Told[LogEvent]:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    reader = LogReader(read)
    with pytest.raises(OSError, match="the disk"):
        await reader.read(QUERY)
    assert await reader.read(QUERY) == Told(())
