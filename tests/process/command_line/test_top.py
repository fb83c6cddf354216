"""`rachis top` on a terminal: what it draws of a cluster, and that keys lead on."""

import asyncio
import os
import pty
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from unittest import mock

from control_plane.fleet.worker_views import WorkerViews
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster


class Screen:
    """What has come so far, and the terminal's other end."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self.text = ""
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(terminal, self._read)

    def _read(self) -> None:
        try:
            self.text += os.read(self._terminal, 65536).decode(errors="replace")
        except OSError:
            self.close()
        self._news.set()

    def press(self, keys: str) -> None:
        self.text = ""
        os.write(self._terminal, keys.encode())

    async def shows(self, holds: Callable[[str], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds(self.text):
                self._news.clear()
                await self._news.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._terminal)


@asynccontextmanager
async def started(
    cluster: Cluster, *arguments: str, terminal: int | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    place: int = asyncio.subprocess.PIPE if terminal is None else terminal
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "command_line.main", "top", "--address", cluster.router.address, *arguments,
        stdin=place, stdout=place, stderr=place, env=os.environ | {"COLUMNS": "120", "LINES": "40", "TERM": "xterm"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(60):
        return await process.wait()


@asynccontextmanager
async def a_cluster() -> AsyncIterator[Cluster]:
    async with running_cluster() as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        await cluster.generate(request_id="the-request")
        yield cluster


async def test_keys_lead_to_requests_and_their_stages_and_out() -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    async with a_cluster() as cluster, started(cluster, "--interval-s", "0.2", terminal=theirs) as process:
        screen = Screen(ours)
        await screen.shows(lambda text: "decode-0" in text and "prefill-0" in text)
        screen.press("r")
        await screen.shows(lambda text: "the-request" in text and "finished" in text)
        screen.press("\r")
        await screen.shows(lambda text: "tokenization" in text and "in all" in text)
        screen.press("\x1b")
        screen.press("w\r")
        await screen.shows(lambda text: "resident_bytes" in text)
        screen.press("q")
        assert await ended(process) == 0
        assert termios.tcgetattr(theirs) == before, "the terminal is left as it was"
        screen.close()


async def test_a_router_that_goes_is_said_and_the_view_stays() -> None:
    ours, theirs = pty.openpty()
    async with a_cluster() as cluster, started(cluster, "--interval-s", "0.2", terminal=theirs) as process:
        screen = Screen(ours)
        await screen.shows(lambda text: "decode-0" in text)
        await cluster.router.stop()
        await screen.shows(lambda text: "does not answer" in text)
        screen.press("q")
        assert await ended(process) == 0
        screen.close()


async def test_keys_are_heeded_while_the_router_hangs() -> None:
    ours, theirs = pty.openpty()
    async with a_cluster() as cluster, started(cluster, "--interval-s", "0.2", terminal=theirs) as process:
        screen = Screen(ours)
        await screen.shows(lambda text: "decode-0" in text)
        asked, given_up = asyncio.Event(), asyncio.Event()

        async def hangs(*_: object, **__: object) -> None:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()

        # A router that hangs in one call and answers the others has no port.
        with mock.patch.object(WorkerViews, "gather", hangs):
            await asked.wait()
            screen.press("r")
            await screen.shows(lambda text: "the-request" in text)
            assert not given_up.is_set(), "it still waits for the router"
            screen.press("q")
            assert await ended(process) == 0
        screen.close()


async def test_without_a_terminal_it_prints_once_or_says_so() -> None:
    async with a_cluster() as cluster:
        async with started(cluster, "--once") as process:
            told, _ = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0 and b"decode-0" in told and b"the-request" in told
        async with started(cluster) as process:
            _, said = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 2 and b"--once" in said and b"Traceback" not in said
