"""The gateways that `rachis serve` starts beside its router: processes of `rachis gateway` that share a port."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster_configs.front_keys import apart
from cluster_configs.schema import GATEWAY_SECURITY, GatewaySection, SecuritySection
from cluster_core.event_log import LogRules
from cluster_core.ports import hold_port
from control_plane.service.kept_processes import PAUSES, Kept, KeptProcesses, Pauses
from worker_runtime.preloaded_python import engine_python

_STOP_TIMEOUT_S = 10.0
_KEY_OF_FRONT = "VLLM_API_KEY"


@dataclass(frozen=True, slots=True)
class GatewayLogs:
    """folder: of their files. service: whose they are."""

    folder: Path
    service: str
    rules: LogRules = field(default_factory=LogRules)

    def of(self, number: int) -> Path:
        """The events of the one with this number, which begins its file anew when it is full."""
        return self.folder / f"gateway-{number}.log"

    def errors_of(self, number: int) -> Path:
        """What it writes to standard error: why it could not start, or how it ended."""
        return self.folder / f"gateway-{number}.err"

    def settings(self, number: int) -> tuple[str, ...]:
        rules = ("--set", f"log_level={self.rules.level}", "--set", f"log_format={self.rules.form}")
        return "--log-file", str(self.of(number)), "--service", self.service, *rules


class Gateways:
    """`start`, then `first_url`, then `stop`. router: where they find it."""

    def __init__(
        self,
        section: GatewaySection,
        router: str,
        logs: GatewayLogs,
        command: Sequence[str] = (),
        *,
        redis_url: str = "",
        security: SecuritySection | None = None,
        pauses: Pauses = PAUSES,
    ) -> None:
        """command: what is run, with options behind it; a test has another. redis_url: where they store responses.

        Raises StartError where no port is free.
        """
        assert section.port is not None, "it is configured"
        front_options, environment = _front(section.options)
        options = (
            "--address", router, "--host", section.host, "--port", str(section.port or hold_port(section.host)),
            "--json", "--redis", "-", *_settings(section), *_security_settings(security or SecuritySection()),
            "--disable-uvicorn-access-log", *front_options,
        )  # fmt: skip
        start = command or (*engine_python(), "-m", "command_line.main", "gateway")

        def whole(number: int) -> tuple[str, ...]:
            return *start, *logs.settings(number), *options

        kept = Kept("gateway", section.processes, whole, f"{redis_url}\n", logs.errors_of, environment)
        self.processes = KeptProcesses(kept, pauses)

    def start(self) -> None:
        self.processes.start()

    async def first_url(self) -> str:
        """Once one of them listens: who waits bounds the wait."""
        return str((await self.processes.first_up())["url"])

    async def stop(self) -> None:
        await self.processes.stop(_STOP_TIMEOUT_S)


def _front(options: Sequence[str]) -> tuple[Sequence[str], dict[str, str] | None]:
    """What vLLM's front gets as arguments, which all users of the host see, and in its environment. It takes one key
    from there; several are arguments all the same."""
    others, keys = apart(options)
    return (others, {**os.environ, _KEY_OF_FRONT: keys[0]}) if len(keys) == 1 else (options, None)


def _settings(section: GatewaySection) -> Iterator[str]:
    """What a gateway is told of its section, beside its place."""
    for part in ("websocket", "stored_responses"):
        for name, value in getattr(section, part).model_dump().items():
            yield from ("--set", f"gateway.{part}.{name}={value}")


def _security_settings(security: SecuritySection) -> Iterator[str]:
    """What it needs of it: keys are the routers' alone."""
    for name, value in security.model_dump(include=set(GATEWAY_SECURITY), exclude_defaults=True).items():
        yield from ("--set", f"security.{name}={value}")
