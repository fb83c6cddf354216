"""`python -m tests.hosts`: the tests on many hosts, in a network namespace of their own. What `make test-hosts` runs.

The namespace is the laptop's: bridge, cables and hosts are gone with it, however it ends. What the hosts need and this
machine has not is installed first. Where hosts cannot be made, the tests are skipped, and the last line says why.
Arguments go to pytest.
"""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.hosts import IN_NAMESPACE

# Command: the Debian package that it is in.
_COMMANDS = {
    "ip": "iproute2", "rsync": "rsync", "sshd": "openssh-server", "ssh": "openssh-client", "ps": "procps",
    "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "git": "git", "make": "make",
}  # fmt: skip
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
# What the hosts' `make setup` compares the virtual environment with; it is read-only there.
_MADE_FROM = ("requirements/cpu.lock", "requirements/torch-cpu.lock", "pyproject.toml")
_APT_S = 300
_SHOW_STAGES = ["-o", "log_cli=true", "-o", "log_cli_level=INFO", "-o", "log_cli_format=%(asctime)s %(message)s"]
_NAMESPACES = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
# Debian starts what it installs unless this file says no. Nobody asked for an SSH server on this machine.
_START_POLICY = Path("/usr/sbin/policy-rc.d")


def why_not() -> str | None:
    """Why hosts cannot be made here, in a sentence; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"hosts are made of Linux namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "hosts are made of namespaces with networks, which only root may make"
    if missing_packages():
        names = " ".join(missing_packages())
        return f"what is in these Debian packages is missing: {names} (apt-get install {names})"
    stamp, compiled = Path(sys.prefix) / ".rachis-cpu", Path(sys.prefix) / ".rachis-compiled"
    if not (is_made(stamp, *map(Path, _MADE_FROM)) and is_made(compiled, stamp)):
        return f"{sys.prefix} is not up to date, or not of profile cpu: `make test-hosts PROFILE=cpu VENV=.venv-cpu`"
    script = "ip link add t0 type bridge && ip link add t1 type veth peer name t2 && mount -t tmpfs tmpfs /mnt"
    tried = subprocess.run([*_NAMESPACES, "sh", "-c", script], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"this machine does not let root make namespaces, bridges and mounts: {tried.stderr.strip()}"
    return None


def is_made(target: Path, *sources: Path) -> bool:
    """As make sees it."""
    return target.exists() and all(each.stat().st_mtime <= target.stat().st_mtime for each in sources)


def missing_packages() -> list[str]:
    path = f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}"
    return sorted({package for command, package in _COMMANDS.items() if not shutil.which(command, path=path)})


def install(packages: list[str]) -> None:
    """With apt-get, where there is one; what comes of it is told by `why_not`."""
    if not packages or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    makes_policy = not _START_POLICY.exists()
    if makes_policy:
        _START_POLICY.write_text("#!/bin/sh\nexit 101\n")
        _START_POLICY.chmod(0o755)
    try:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in ("update", "install"):
            arguments = [] if command == "update" else ["--yes", "--no-install-recommends", *packages]
            subprocess.run(["apt-get", "--quiet=2", command, *arguments], env=environment, check=False, timeout=_APT_S)
    finally:
        if makes_policy:
            _START_POLICY.unlink()


def main() -> None:
    with suppress(subprocess.TimeoutExpired):
        install(missing_packages())
    reason = why_not()
    if reason is not None:
        sys.stdout.write(f"tests/hosts SKIPPED: {reason}\n")
        return
    # --exitfirst: what one test leaves broken, the next ones would only find again.
    pytest = [sys.executable, "-m", "pytest", "tests/hosts", "--exitfirst", *_SHOW_STAGES, *sys.argv[1:]]
    os.execvpe("unshare", ["unshare", "--net", *pytest], {**os.environ, IN_NAMESPACE: "1"})


if __name__ == "__main__":
    main()
