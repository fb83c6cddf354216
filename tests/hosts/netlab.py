"""Hosts out of Linux namespaces on one machine, with a bridge between them.

A host has its own address, SSH server, processes, host name, HOME and /tmp, and sees nothing of the checkout. The
process that makes them has to be in a network namespace of its own (`python -m tests.hosts`), which is the laptop's: so
it reaches every host by its address. Namespaces have no names here: each is gone with the last process in it, and all
processes of a host end with its PID 1, which ends with the process that made it.
"""

import shlex
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from control_plane.child_process import bind_to_parent

REPOSITORY = Path(__file__).resolve().parents[2]
KEY = ".ssh/id_ed25519"
_INIT = Path(__file__).with_name("host_init.sh")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BRIDGE = "hosts"
_START_S = 20.0
_POLL_S = 0.05


class LabError(Exception):
    """Something that the test hosts were asked for did not work."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """name: also the host's own name for itself."""

    name: str
    address: str


LAPTOP = HostSpec("laptop", "10.77.0.1")


class Host:
    """One host. `environment` is what each of its shells has, as lines for .bashrc."""

    def __init__(self, spec: HostSpec, disk: Path) -> None:
        self.name = spec.name
        self.address = spec.address
        self.disk = disk
        self._process: subprocess.Popen[bytes] | None = None
        self._init_pid = 0

    @property
    def home(self) -> Path:
        """Its HOME, seen from outside."""
        return self.disk / "root"

    @property
    def is_on(self) -> bool:
        return self._process is not None

    @property
    def _port(self) -> str:
        """Its end of the cable at the bridge."""
        return f"to-{self.name}"[:15]

    def power_on(self) -> None:
        """Raises LabError when it is not up in time."""
        is_laptop = self.name == LAPTOP.name
        ready = self.disk / "ready"
        ready.unlink(missing_ok=True)
        # HOME stays through a power cut, like a disk; memory and temporary files do not.
        shutil.rmtree(self.disk / "tmp", ignore_errors=True)
        (self.disk / "tmp").mkdir(mode=0o1777)
        kept = [sys.prefix, sys.base_prefix]
        hidden = sorted({str(REPOSITORY), str(Path(sys.prefix).parent)})
        namespaces = ["--mount", "--uts", "--ipc", "--pid", *([] if is_laptop else ["--net"])]
        command = [
            "unshare", *namespaces, "--fork", "--kill-child", "--mount-proc", "bash", str(_INIT),
            self.name, "-" if is_laptop else self.address, LAPTOP.address, str(self.disk),
            ":".join(hidden), ":".join(kept),
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", preexec_fn=bind_to_parent,
                env={"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"},
            )  # fmt: skip
        self._init_pid = self._wait_for_init()
        if not is_laptop:
            _ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self._init_pid))
            _ip("link", "set", self._port, "master", _BRIDGE, "up")
        self._until(ready.exists, "is not up")
        if not is_laptop:
            self._until(self._answers, "has no SSH server")

    def power_off(self) -> None:
        """Like a pulled plug: every process of the host is gone at once, its end of the cable too."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(_START_S)
        # The kernel ends PID 1 with the process that made it, and with PID 1 all others.
        self._until(lambda: not Path(f"/proc/{self._init_pid}/ns/pid").exists(), "has processes that do not end")
        self._process = None
        subprocess.run(["ip", "link", "delete", self._port], stderr=subprocess.DEVNULL, check=False)

    def cut(self) -> None:
        """Pulls its network cable."""
        _ip("link", "set", self._port, "down")

    def mend(self) -> None:
        _ip("link", "set", self._port, "up")

    def argv(self, command: str) -> list[str]:
        """Runs a line of shell on the host, not through its network: it works while the link is cut."""
        return [
            "nsenter", "--target", str(self._init_pid), "--mount", "--uts", "--ipc", "--net", "--pid",
            "env", "--ignore-environment", "HOME=/root", "USER=root", "LANG=C.UTF-8", "TERM=dumb",
            "BASH_ENV=/root/.bashrc", "/bin/bash", "-c", f"cd; {command}",
        ]  # fmt: skip

    def run(self, command: str, timeout_s: float = 60.0) -> str:
        """Its output. Raises LabError when it fails or takes longer."""
        try:
            done = subprocess.run(
                self.argv(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            output = late.stdout.decode(errors="replace") if late.stdout else ""
            raise LabError(f"{self.name}: {command!r} ran longer than {timeout_s:g} s\n{output[-4000:]}") from None
        if done.returncode:
            raise LabError(f"{self.name}: {command!r} ended with {done.returncode}\n{done.stdout[-4000:]}")
        return done.stdout

    def start(self, command: str, log: Path) -> subprocess.Popen[bytes]:
        """Runs it in the background."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.argv(f"exec {command}"), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def processes(self) -> list[str]:
        """Command lines of what runs there, but for what a host always has."""
        lines = self.run("ps -eo pid=,args=").splitlines()
        own = ("/bin/bash -c cd; ps", "ps -eo", "bash " + str(_INIT), "sleep 3600", "sshd: ")
        commands = [line.split(maxsplit=1) for line in lines]
        return [args for pid, args in commands if not args.startswith(own) and "/usr/sbin/sshd" not in args]

    def listening(self) -> list[int]:
        """Ports that something listens on, but for the SSH server's."""
        lines = self.run("ss --no-header --listening --tcp --numeric").splitlines()
        ports = {int(line.split()[3].rpartition(":")[2]) for line in lines}
        return sorted(ports - {22})

    @property
    def _log(self) -> Path:
        return self.disk / "log"

    def _wait_for_init(self) -> int:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self._until(lambda: self._process_runs() and children.read_text().strip(), "has no first process")
        return int(children.read_text().split()[0])

    def _process_runs(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise LabError(f"{self.name} did not start: {self._log.read_text()[-2000:]}")
        return True

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.address, 22), timeout=1.0):
                return True
        except OSError:
            return False

    def _until(self, condition: "object", what: str) -> None:
        deadline = time.monotonic() + _START_S
        while not condition():  # type: ignore[operator]
            if time.monotonic() > deadline:
                raise LabError(f"host {self.name} {what} after {_START_S:g} s: {self._log.read_text()[-2000:]}")
            time.sleep(_POLL_S)


class Lab:
    """A laptop and hosts. `with Lab(...)` makes them and takes them away."""
