"""The gateways that `rachis serve` starts beside its router: processes of `rachis gateway` that share a port."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster_configs.front_keys import apart
from cluster_configs.schema import GATEWAY_SECURITY, GatewaySection, SecuritySection
from cluster_core.event_log import LogRules
from cluster_core.ports import hold_port
from control_plane.service.kept_processes import PAUSES, Kept, KeptProcesses, Pauses
from worker_runtime.preloaded_python import engine_python

_STOP_TIMEOUT_S = 10.0
_KEY_OF_FRONT = "VLLM_API_KEY"


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
        """command: what is run, with options behind it; a test has another. redis_url: where they store responses.

        Raises StartError where no port is free.
        """
        assert section.port is not None, "it is configured"
        front_options, environment = _front(section.options)
        options = (
            "--address", router, "--host", section.host, "--port", str(section.port or hold_port(section.host)),
            "--json", "--redis", "-", *_settings(section), *_security_settings(security or SecuritySection()),
            *_log_settings(logs or LogRules()), "--disable-uvicorn-access-log", *front_options,
        )  # fmt: skip
        whole = (*(command or (*engine_python(), "-m", "command_line.main", "gateway")), *options)
        log = lambda number: folder / f"gateway-{number}.log"  # noqa: E731
        self.processes = KeptProcesses(
            Kept("gateway", section.processes, lambda _: whole, f"{redis_url}\n", log, environment), pauses
        )

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


def _log_settings(logs: LogRules) -> tuple[str, ...]:
    return "--set", f"log_level={logs.level}", "--set", f"log_format={logs.form}"
