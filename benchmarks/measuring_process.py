"""Measurements with an engine in a process of their own, and what it tells the command line meanwhile.

The process sets the engine's environment before anything reads it, loads vLLM and torch, and drives the engine in its
own asyncio loop; when it ends, all memory is free again. What vLLM writes goes into a log, not between progress bars.

    python -m MODULE ARGUMENTS.json     one report for each line of standard output: the mark and a JSON object
    {"phase": text} | {"total": steps} | {"done": steps} | {"result": {...}} | {"error": text, "users": bool}
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from cluster_configs.schema import RachisConfig
from cluster_core.bound_child import bind_to_parent
from cluster_core.clock import cpu_s
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import ClientFault, InvalidInputError, RachisError, UnavailableError
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment
from worker_runtime.preloaded_python import engine_python

if TYPE_CHECKING:
    from worker_runtime.vllm_engine import VllmEngine

_MARK = "rachis-report "
# A result holds every sample of a measurement.
_MAX_LINE_BYTES = 64 << 20
# What has given its result ends by itself, or is ended.
_STOP_TIMEOUT_S = 30.0


class Reports(Protocol):
    """Hears how a measurement goes on."""

    def phase(self, text: str) -> None: ...

    def total(self, steps: int) -> None:
        """How many steps there will be; called once, before the first."""
        ...

    def done(self, steps: int = 1) -> None: ...


async def measure_in_process(module: str, arguments: dict[str, Any], reports: Reports) -> dict[str, Any]:
    """The result of `python -m module`. Raises InvalidInputError or UnavailableError, whichever fault ended it."""
    with tempfile.TemporaryDirectory(prefix="rachis-measure-") as folder:
        file = Path(folder) / "arguments.json"
        file.write_text(json.dumps(arguments))
        with (Path(folder) / "log").open("w+b") as log:
            process = await asyncio.create_subprocess_exec(
                *engine_python(), "-m", module, str(file), stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE, stderr=log, limit=_MAX_LINE_BYTES, preexec_fn=bind_to_parent,
            )  # fmt: skip
            assert process.stdout is not None
            try:
                result = await _follow(process.stdout, reports)
                if result is None:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines()
                    raise UnavailableError(f"the measurement ended early: {lines[-1] if lines else 'no word'}")
                with suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_TIMEOUT_S):
                        await process.wait()
                return result
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()


async def _follow(output: asyncio.StreamReader, reports: Reports) -> dict[str, Any] | None:
    async for line in output:
        if not line.startswith(_MARK.encode()):
            continue
        report = json.loads(line[len(_MARK) :])
        match report:
            case {"phase": text}:
                reports.phase(text)
            case {"total": steps}:
                reports.total(steps)
            case {"done": steps}:
                reports.done(steps)
            case {"error": text, "users": users}:
                raise InvalidInputError(text) if users else UnavailableError(text)
            case {"result": result}:
                return dict(result)
    return None


# In the process.


class _Lines:
    """Reports as lines of standard output."""

    def phase(self, text: str) -> None:
        _print_report(phase=text)

    def total(self, steps: int) -> None:
        _print_report(total=steps)

    def done(self, steps: int = 1) -> None:
        _print_report(done=steps)


def _print_report(**report: Any) -> None:
    print(_MARK + json.dumps(report), flush=True)


def run_measurement(measure: Callable[[dict[str, Any], Reports], Awaitable[dict[str, Any]]]) -> None:
    """The main function of a measuring module: reads its arguments, measures, reports."""
    arguments = json.loads(Path(sys.argv[1]).read_text())

    async def reported() -> None:
        try:
            _print_report(result=await measure(arguments, _Lines()))
        except RachisError as error:
            _print_report(error=str(error), users=isinstance(error, ClientFault))

    asyncio.run(reported())


def foreign_cpu_s() -> float:
    """CPU seconds of all processes but this one, since the machine is up."""
    times = psutil.cpu_times()
    return float(times.user + times.system) - cpu_s()


@asynccontextmanager
async def in_process_engine(
    config: RachisConfig, role: EngineRole, reports: Reports
) -> AsyncIterator[tuple["VllmEngine", EngineInfo]]:
    """An engine in this process, stopped after the block. One after the other, as many as are wanted."""
    settings = EngineSettings(
        *(config.model, config.engine, config.handoff, role, config.streaming),
        tiers=config.tiers,
        decode=config.decode,
        objectives=config.objectives,
    )
    os.environ.update(engine_environment(settings))
    # Imported here because it reads the environment.
    from worker_runtime.vllm_engine import VllmEngine

    engine = VllmEngine(settings)
    try:
        yield engine, await engine.start(reports.phase, lambda why: None)
    finally:
        await engine.stop()
