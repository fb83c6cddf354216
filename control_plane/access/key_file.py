"""The file of API keys: edited by one at a time, and followed by every router that has it.

An edit replaces the file as a whole, so that no reader sees a part of it.
"""

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from cluster_core.clock import monotonic_s
from cluster_core.errors import ConfigError
from control_plane.access import api_keys
from control_plane.access.api_keys import ApiKey
from control_plane.access.followed_file import FollowedFile

_FIELD = "security.keys_file"
_MODE = 0o600
_LOCK_TIMEOUT_S = 10.0
_LOCK_POLL_S = 0.02
_Answer = TypeVar("_Answer")


class KeyFile(FollowedFile[Mapping[str, ApiKey]]):
    """keys: by id, replaced as a whole."""

    def __init__(self, path: Path, refresh_s: float) -> None:
        super().__init__(path, lambda file: MappingProxyType(read_keys(file)), field=_FIELD, refresh_s=refresh_s)

    @property
    def keys(self) -> Mapping[str, ApiKey]:
        return self.value


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Raises ConfigError, OSError."""
    try:
        return api_keys.read(path.read_text())
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no file of keys", field=_FIELD) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", field=_FIELD) from None


def edit(path: Path, change: Callable[[dict[str, ApiKey]], _Answer]) -> _Answer:
    """Has `change` alter the keys, while nobody else does. A file that is not there has none. Raises ConfigError."""
    try:
        # Through links: what routers read is changed.
        path = path.resolve()
        with _locked(path.parent):
            keys = read_keys(path) if path.exists() else {}
            answer = change(keys)
            _replace(path, api_keys.written(keys))
            return answer
    except OSError as error:
        raise ConfigError(f"{path} cannot be changed: {error.strerror}", field=_FIELD) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """By the folder itself: a file for it would be somebody's, and keep others out. Raises ConfigError."""
    handle, until_s = os.open(folder, os.O_RDONLY), monotonic_s() + _LOCK_TIMEOUT_S
    try:
        while not _is_locked(handle):
            if monotonic_s() > until_s:
                raise ConfigError(f"somebody else changes it, for {_LOCK_TIMEOUT_S:g} s by now", field=_FIELD)
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(handle)


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    made = Path(name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        made.chmod(_MODE)
        if path.exists():
            before = path.stat()
            # Who could read it can go on reading it: a router that cannot keeps every key.
            os.chown(made, before.st_uid, before.st_gid)
            made.chmod(stat.S_IMODE(before.st_mode))
        made.replace(path)
    except BaseException:
        made.unlink()
        raise
