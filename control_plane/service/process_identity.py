"""Which process of this machine somebody is: a number is given to another one once its process has ended.

No setting of a clock changes the answer.
"""

from pathlib import Path


def machine() -> str:
    """Of one boot and one space of process ids: whoever has the same sees the same processes. Empty: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def began_ticks(pid: int) -> int:
    """When it began, since the boot: no setting of a clock moves it. 0: unknown, or there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
