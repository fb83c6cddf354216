"""`python -m tests.hosts`: the tests on many hosts, in namespaces of their own. What `make test-hosts` runs.

The network namespace is the test hosts' laptop: bridge, cables and hosts are gone with it, however it ends. Where
namespaces cannot be made, the tests are skipped, and the reason is the last line. Arguments go to pytest.
"""

import os
import shutil
import subprocess
import sys

from tests.hosts import IN_NAMESPACE

# Command: the Debian package that it is in.
_COMMANDS = {
    "ip": "iproute2", "rsync": "rsync", "sshd": "openssh-server", "ssh": "openssh-client", "ps": "procps",
    "unshare": "util-linux", "nsenter": "util-linux", "git": "git", "make": "make",
}  # fmt: skip
_SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"
_NAMESPACES = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]


def why_not() -> str | None:
    """Why these tests cannot run here, in a sentence; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"hosts are made of Linux namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "hosts are made of namespaces with networks, which only root may make"
    path = f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}"
    missing = sorted({package for command, package in _COMMANDS.items() if not shutil.which(command, path=path)})
    if missing:
        return f"these Debian packages are missing: {' '.join(missing)} (apt-get install {' '.join(missing)})"
    script = "ip link add t0 type bridge && ip link add t1 type veth peer name t2 && mount -t tmpfs tmpfs /mnt"
    tried = subprocess.run([*_NAMESPACES, "sh", "-c", script], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"this machine does not let root make namespaces, bridges and mounts: {tried.stderr.strip()}"
    return None


def main() -> int:
    reason = why_not()
    if reason is not None:
        print(f"tests/hosts SKIPPED: {reason}")
        return 0
    command = ["unshare", "--net", sys.executable, "-m", "pytest", "tests/hosts", *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, IN_NAMESPACE: "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
