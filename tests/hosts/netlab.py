"""Hosts out of Linux namespaces on one machine, and the network between them.

A host has an address, an SSH server, processes, a host name, a HOME and a /tmp of its own, and sees nothing of the
checkout. The process that makes hosts has to be in a network namespace of its own (`python -m tests.hosts`), which is
the laptop's: so it reaches every host by its address. The namespaces have no names: each is gone with the last process
in it. All processes of a host end with its PID 1, and that one with the process that made it.
"""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster_core.clock import monotonic_s

REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INIT = Path(__file__).with_name("host_init.sh")
_BRIDGE = "hosts"
_SSH_PORT = 22
_START_S = 60.0
_UNPLUG_S = 10.0
_POLL_S = 0.05
# What every host runs anyway, and what looks for processes.
_OWN_COMMANDS = (f"bash {_INIT}", "sleep 3600", "sshd", "/usr/sbin/sshd", "/bin/bash -c cd; ps", "ps -e")


class LabError(Exception):
    """Something that was asked of the test hosts did not work."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """name: by which the host also knows itself."""

    name: str
    address: str


LAPTOP = HostSpec("laptop", "10.77.0.1")


def bring_up_network() -> None:
    """The bridge that all hosts are connected to, with the laptop's address. Once for each network namespace."""
    _ip("link", "set", "lo", "up")
    _ip("link", "add", _BRIDGE, "type", "bridge")
    _ip("address", "add", f"{LAPTOP.address}/24", "dev", _BRIDGE)
    _ip("link", "set", _BRIDGE, "up")


def cables() -> list[str]:
    """The bridge's ends of the hosts' cables; one is gone as soon as its host is."""
    lines = _ip("-brief", "link", "show", "master", _BRIDGE).splitlines()
    return [line.split("@")[0] for line in lines]


class Host:
    """One host. Its disk, a folder, is prepared by `tests.hosts.disks` and stays while the power is off."""

    def __init__(self, spec: HostSpec, disk: Path) -> None:
        self.name = spec.name
        self.address = spec.address
        self._disk = disk
        self._process: subprocess.Popen[bytes] | None = None
        self._init_pid = 0
        self._cable = f"to-{spec.name}"[:15]

    @property
    def tmp(self) -> Path:
        """Its /tmp, as it lies on this machine."""
        return self._disk / "tmp"

    @property
    def home(self) -> Path:
        """Its HOME, as seen from outside."""
        return self._disk / "root"

    @property
    def _is_laptop(self) -> bool:
        return self.name == LAPTOP.name

    def power_on(self) -> None:
        """Raises LabError when it is not up in time. To be called on a thread that outlives the host."""
        ready = self._disk / "ready"
        ready.unlink(missing_ok=True)
        shutil.rmtree(self._disk / "tmp", ignore_errors=True)
        (self._disk / "tmp").mkdir()
        (self._disk / "tmp").chmod(0o1777)
        hidden = sorted({str(REPOSITORY), str(Path(sys.prefix).parent)})
        namespaces = ["--mount", "--uts", "--ipc", "--pid", *([] if self._is_laptop else ["--net"])]
        command = [
            "setpriv", "--pdeathsig", "KILL",
            "unshare", *namespaces, "--fork", "--kill-child", "--mount-proc", "bash", str(_INIT),
            self.name, "-" if self._is_laptop else self.address, LAPTOP.address, str(self._disk),
            ":".join(hidden), f"{sys.prefix}:{sys.base_prefix}",
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                env={"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8"}, start_new_session=True,
            )  # fmt: skip
        self._init_pid = self._first_process(self._process)
        if not self._is_laptop:
            # The same network card after each power cut: the others know the address by it.
            card = "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))
            peer = ["peer", "name", "eth0", "address", card, "netns", str(self._init_pid)]
            _ip("link", "add", self._cable, "type", "veth", *peer)
            _ip("link", "set", self._cable, "master", _BRIDGE, "up")
        self._until(ready.exists, "is not up")
        if not self._is_laptop:
            self._until(self._answers, "has no SSH server")

    def power_off(self) -> None:
        """Like a pulled plug: all processes of the host are gone at once, and its end of the cable with them."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(_START_S)
        self._until(self._is_dead, "has processes that do not end")
        try:
            self._until(self._is_unplugged, "has a cable that does not go", _UNPLUG_S)
        except LabError:
            # No process is left in that network: the kernel keeps it for connections whose peer is gone as well.
            _ip("link", "delete", self._cable)
        self._process = None

    def cut(self) -> None:
        """Pulls its network cable."""
        _ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        _ip("link", "set", self._cable, "up")

    def argv(self, command: str) -> list[str]:
        """What runs a line of shell on the host. It does not go through the network: a cut host can be asked too."""
        return [
            "nsenter", "--target", str(self._init_pid), "--mount", "--uts", "--ipc", "--net", "--pid",
            "env", "--ignore-environment", "HOME=/root", "USER=root", "LANG=C.UTF-8", "TERM=dumb",
            "BASH_ENV=/root/.bashrc", "/bin/bash", "-c", f"cd; {command}",
        ]  # fmt: skip

    def run(self, command: str, timeout_s: float = 60.0) -> str:
        """Its output and errors. Raises LabError when it fails or takes longer."""
        try:
            done = subprocess.run(
                self.argv(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise LabError(
                f"{self.name}: {command!r} ran longer than {timeout_s:g} s\n{_tail(late.stdout or b'')}"
            ) from None
        if done.returncode:
            raise LabError(f"{self.name}: {command!r} ended with {done.returncode}\n{_tail(done.stdout)}")
        return done.stdout.decode(errors="replace")

    def start(self, command: str, log: Path) -> subprocess.Popen[bytes]:
        """Runs it in the background."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.argv(f"exec {command}"), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def processes(self) -> list[str]:
        """Command lines of what runs there, but for what a host always runs."""
        commands = [line.strip() for line in self.run("ps -e -o args=").splitlines()]
        return [command for command in commands if command and not command.startswith(_OWN_COMMANDS)]

    def listening_ports(self) -> list[int]:
        """TCP ports that something listens on, but for the SSH server's."""
        lines = self.run("ss --no-header --listening --tcp --numeric").splitlines()
        ports = {int(line.split()[3].rpartition(":")[2]) for line in lines}
        return sorted(ports - {_SSH_PORT})

    @property
    def _log(self) -> Path:
        return self._disk / "log"

    def _first_process(self, parent: subprocess.Popen[bytes]) -> int:
        """PID 1 of the host, as this machine counts."""
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        self._until(lambda: parent.poll() is not None or children.read_text().strip(), "has no first process")
        if parent.poll() is not None:
            raise LabError(f"host {self.name} did not start: {_tail(self._log.read_bytes())}")
        return int(children.read_text().split()[0])

    def _is_dead(self) -> bool:
        """A PID 1 that is a zombie has no processes left beside it."""
        try:
            return Path(f"/proc/{self._init_pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    def _is_unplugged(self) -> bool:
        """The kernel takes a namespace's end of the cable away some time after its last process has ended."""
        return self._cable not in {name for _, name in socket.if_nameindex()}

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.address, _SSH_PORT), timeout=1.0):
                return True
        except OSError:
            return False

    def _until(self, condition: Callable[[], object], what: str, timeout_s: float = _START_S) -> None:
        deadline_s = monotonic_s() + timeout_s
        while not condition():
            if monotonic_s() > deadline_s:
                raise LabError(f"host {self.name} {what} after {timeout_s:g} s: {_tail(self._log.read_bytes())}")
            time.sleep(_POLL_S)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _tail(output: bytes) -> str:
    return output.decode(errors="replace")[-4000:]
