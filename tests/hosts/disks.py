"""What lies on the disks of the test hosts before the power is switched on.

A host is as somebody would find it who runs `ray up` there a second time: an SSH server that takes the laptop's key, a
virtual environment in ~/rachis-venv, and nothing of the project. On the laptop lie the key and a clean copy of the
project, from which `ray up` brings it to the hosts.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.netlab import LAPTOP, REPOSITORY, SYSTEM_PATH, Host, HostSpec, LabError

# Ray notices in seconds what takes it minutes with its own settings. Hosts take them from their users' environment.
_IMPATIENT_RAY = {
    "RAY_health_check_initial_delay_ms": 1000,
    "RAY_health_check_period_ms": 1000,
    "RAY_health_check_timeout_ms": 1000,
    "RAY_health_check_failure_threshold": 5,
    "AUTOSCALER_UPDATE_INTERVAL_S": 1,
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": 5,
    "AUTOSCALER_NODE_SSH_INTERVAL_S": 1,
}
_SSHD_CONFIG = """\
Port 22
ListenAddress {address}
HostKey /run/disk/ssh/hostkey
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
"""


def make_hosts(folder: Path, specs: Sequence[HostSpec]) -> tuple[Host, list[Host]]:
    """(laptop, hosts), off, with their disks below `folder`."""
    key = folder / "key"
    _make_key(key)
    names = "127.0.0.1 localhost\n" + "".join(f"{spec.address} {spec.name}\n" for spec in [LAPTOP, *specs])
    laptop, *hosts = (Host(spec, _disk(folder, spec, names)) for spec in [LAPTOP, *specs])
    _install(key, laptop.home / ".ssh" / "id_ed25519")
    _copy_project(laptop.home / "project")
    for host in hosts:
        _install(key.with_suffix(".pub"), host.home / ".ssh" / "authorized_keys")
        ssh = folder / host.name / "ssh"
        ssh.mkdir()
        _make_key(ssh / "hostkey")
        (ssh / "sshd_config").write_text(_SSHD_CONFIG.format(address=host.address))
        (host.home / "rachis-venv").symlink_to(sys.prefix)
    return laptop, hosts


def _disk(folder: Path, spec: HostSpec, names: str) -> Path:
    disk = folder / spec.name
    for private in (disk / "root", disk / "root" / ".ssh"):
        private.mkdir(parents=True)
        private.chmod(0o700)
    (disk / "hosts").write_text(names)
    # The virtual environment knows the project by the place of the checkout, which is hidden on the hosts.
    settings = {
        "PATH": f"{SYSTEM_PATH}:{sys.prefix}/bin" if spec == LAPTOP else SYSTEM_PATH,
        "PYTHONPATH": "{0}:{0}/protos".format("$HOME/project" if spec == LAPTOP else "$HOME/rachis"),
        **_IMPATIENT_RAY,
    }
    if spec == LAPTOP:
        # `ray up` would find its files changed.
        settings["PYTHONDONTWRITEBYTECODE"] = 1
    _copy_model_infos(disk / "root")
    lines = [f"export {name}={value}\n" for name, value in settings.items()]
    (disk / "root" / ".bashrc").write_text("".join(lines))
    (disk / "root" / ".profile").write_text(". ~/.bashrc\n")
    return disk


def _copy_model_infos(home: Path) -> None:
    """What vLLM has seen of models here: on a host that has not seen it, each first engine looks for ten seconds."""
    infos = Path(".cache") / "vllm" / "modelinfos"
    if (Path.home() / infos).is_dir():
        shutil.copytree(Path.home() / infos, home / infos)


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _install(key: Path, place: Path) -> None:
    place.write_bytes(key.read_bytes())
    place.chmod(0o600)


def _copy_project(place: Path) -> None:
    """What a clone of the working tree as it stands would hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        raise LabError(f"the project is not in a git checkout: {listed.stderr.strip()}")
    names = [name for name in listed.stdout.split("\0") if name and (REPOSITORY / name).is_file()]
    command = ["rsync", "--archive", "--from0", "--files-from=-", f"{REPOSITORY}/", f"{place}/"]
    subprocess.run(command, input="\0".join(names), text=True, check=True)
