"""What runs on this machine for this user: a small file written by `serve`, read by every other command.

It holds the router's addresses and the service's id; every process of a service carries that id in its environment,
so what is left of one can be found even after its file is gone.
"""

import json
import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster_core.errors import ConfigError
from cluster_core.ids import SERVICE_VARIABLE
from control_plane.service.process_identity import began_ticks, machine

_REAPER = "control_plane.service.reaper"


@dataclass(frozen=True, slots=True)
class ServiceState:
    """address: of prompts and sessions; admin_address: of administration. Empty while it starts.

    started: when its process did, in seconds since 1970 by a clock that may have been set since.
    """

    service_id: str
    address: str
    admin_address: str
    pid: int
    started: float


def state_folder(environment: Mapping[str, str]) -> Path:
    """`RACHIS_STATE_DIR`, or the user's state folder."""
    given = environment.get("RACHIS_STATE_DIR")
    base = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(given) if given else Path(base) / "rachis"


class StateFile:
    """The one service that this folder speaks of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "service.json"

    def read(self) -> ServiceState | None:
        """The running service, or None. A file whose process is gone counts as none."""
        table = self._table()
        state = _state(table)
        return state if state is not None and _is_running(state, table) else None

    def claim(self, state: ServiceState) -> None:
        """Writes the file. Raises ConfigError when another service runs there."""
        running = self.read()
        if running is not None and running.pid != state.pid:
            raise ConfigError(
                f"service {running.service_id} already runs (process {running.pid}, {running.address}); stop it, "
                "or set RACHIS_STATE_DIR to keep a second one apart",
                field="rachis serve",
            )
        temporary = self._path.with_suffix(f".{state.pid}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            process = {"machine": machine(), "process_began": began_ticks(state.pid)}
            temporary.write_text(json.dumps(asdict(state) | process))
            temporary.replace(self._path)
        except OSError as error:
            raise ConfigError(f"cannot be written: {error}", field="RACHIS_STATE_DIR") from None

    def clear(self, pid: int) -> None:
        """Removes the file when it speaks of this process."""
        state = _state(self._table())
        if state is not None and state.pid == pid:
            self._path.unlink(missing_ok=True)

    def _table(self) -> Mapping[str, Any]:
        """What the file holds. Empty for one that is not there, or that no service wrote."""
        try:
            table = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return table if isinstance(table, dict) else {}


def processes_of(service_id: str) -> list[psutil.Process]:
    """Processes of this user that carry the service's id; never this one or its parents."""
    return _marked().get(service_id, [])


def leftovers() -> list[psutil.Process]:
    """Processes of services that have ended: those whose reaper is gone as well."""
    return [process for processes in _marked().values() if not any(map(_is_reaper, processes)) for process in processes]


def end_processes(processes: Collection[psutil.Process], timeout_s: float) -> None:
    """Asks them to end, then ends them."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=timeout_s)


def _marked() -> dict[str, list[psutil.Process]]:
    """This user's processes by the service id they carry."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    marked: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            if process.pid in own or process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            mark = process.environ().get(SERVICE_VARIABLE)
        except psutil.Error:
            continue
        if mark:
            marked.setdefault(mark, []).append(process)
    return marked


def _is_reaper(process: psutil.Process) -> bool:
    try:
        return _REAPER in process.cmdline()
    except psutil.Error:
        return False


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        return


def _state(table: Mapping[str, Any]) -> ServiceState | None:
    """None for a table that no service wrote."""
    try:
        return ServiceState(
            str(table["service_id"]),
            str(table["address"]),
            str(table.get("admin_address", table["address"])),
            int(table["pid"]),
            float(table["started"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


def _is_running(state: ServiceState, table: Mapping[str, Any]) -> bool:
    """Where the file does not say which process of which machine that was, as files of before do not, clocks decide."""
    began = table.get("process_began")
    if began:
        return bool(table.get("machine") == machine() and began_ticks(state.pid) == began)
    try:
        return abs(psutil.Process(state.pid).create_time() - state.started) < 1.0
    except psutil.Error:
        return False
