"""The gateways that `rachis serve` starts beside its router: processes of `rachis gateway` that share a port."""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster_configs.schema import GATEWAY_SECURITY, GatewaySection, SecuritySection
from cluster_core.background import BackgroundTasks
from cluster_core.bound_child import bind_to_parent
from cluster_core.clock import monotonic_s
from cluster_core.event_log import LogRules
from cluster_core.ports import hold_port
from control_plane.service import child_process
from worker_runtime.preloaded_python import engine_python

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_MOST_LOG_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Pauses:
    """Before one that has ended is started again: later each time, until one has lived for long enough."""

    first_s: float = 1.0
    longest_s: float = 30.0
    lived_s: float = 60.0


PAUSES = Pauses()


class Gateways:
    """`start`, then `first_url`, then `stop`. router: where they find it. folder: of their logs."""

    def __init__(
        self,
        section: GatewaySection,
        router: str,
        folder: Path,
        command: Sequence[str] = (),
        *,
        redis_url: str = "",
        security: SecuritySection | None = None,
        logs: LogRules | None = None,
        pauses: Pauses = PAUSES,
    ) -> None:
        """command: what is run, with options behind it; a test has another. redis_url: where they store responses."""
        self._section = section
        self._router = router
        self._folder = folder
        self._redis_url = redis_url
        self._pauses = pauses
        self._settings = (
            *_settings(section),
            *_security_settings(security or SecuritySection()),
            *_log_settings(logs or LogRules()),
        )
        self._command = command or (*engine_python(), "-m", "command_line.main", "gateway")
        self._up = [asyncio.Event() for _ in range(section.processes)]
        self._url = ""
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._background = BackgroundTasks()
        # How often one was started.
        self.starts = 0

    def start(self) -> None:
        assert self._section.port is not None, "it is configured"
        port = self._section.port or hold_port(self._section.host)
        for number in range(self._section.processes):
            self._background.start(self._keep(number, port))

    async def first_url(self) -> str:
        """Once one of them listens: who waits bounds the wait."""
        waits = [asyncio.create_task(up.wait()) for up in self._up]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        return self._url

    async def all_up(self) -> str:
        """Likewise, once each of them has listened."""
        for up in self._up:
            await up.wait()
        return self._url

    @property
    def pids(self) -> list[int]:
        return sorted(process.pid for process in self._processes.values())

    async def stop(self) -> None:
        await self._background.cancel()
        await asyncio.gather(*(child_process.end(each, _STOP_TIMEOUT_S) for each in self._processes.values()))

    async def _keep(self, number: int, port: int) -> None:
        pauses = self._pauses
        pause_s = pauses.first_s
        while True:
            began_s = monotonic_s()
            status = await self._run(number, port)
            if monotonic_s() - began_s > pauses.lived_s:
                pause_s = pauses.first_s
            logger.warning(
                "gateway %d ended with %d, see %s; it is started again in %g s",
                number, status, self._log(number), pause_s,
            )  # fmt: skip
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, pauses.longest_s)

    async def _run(self, number: int, port: int) -> int:
        """One start, to its end."""
        section = self._section
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = self._log(number)
        # Why it ended last is in front, or in the file before.
        if kept.exists() and kept.stat().st_size > _MOST_LOG_BYTES:
            kept.replace(kept.with_name(f"{kept.name}.1"))
        with kept.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command, "--address", self._router, "--host", section.host, "--port", str(port), "--json",
                "--redis", "-", *self._settings, "--disable-uvicorn-access-log", *section.options,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                preexec_fn=bind_to_parent, start_new_session=True,
            )  # fmt: skip
        self.starts += 1
        self._processes[number] = process
        assert process.stdout is not None and process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(f"{self._redis_url}\n".encode())
            await process.stdin.drain()
        process.stdin.close()
        async for line in process.stdout:
            url = _listening_url(line)
            if url:
                self._url = url
                self._up[number].set()
        return await process.wait()

    def _log(self, number: int) -> Path:
        return self._folder / f"gateway-{number}.log"


def _settings(section: GatewaySection) -> Iterator[str]:
    """What a gateway is told of its section, beside its place."""
    for part in ("websocket", "stored_responses"):
        for name, value in getattr(section, part).model_dump().items():
            yield from ("--set", f"gateway.{part}.{name}={value}")


def _security_settings(security: SecuritySection) -> Iterator[str]:
    """What it needs of it: keys are the routers' alone."""
    for name, value in security.model_dump(include=set(GATEWAY_SECURITY), exclude_defaults=True).items():
        yield from ("--set", f"security.{name}={value}")


def _log_settings(logs: LogRules) -> tuple[str, ...]:
    return "--set", f"log_level={logs.level}", "--set", f"log_format={logs.form}"


def _listening_url(line: bytes) -> str:
    """Empty for a line that does not say it."""
    try:
        event = json.loads(line)
    except ValueError:
        return ""
    return str(event.get("url", "")) if isinstance(event, dict) and event.get("event") == "listening" else ""
