"""The file of API keys: edited by one at a time, and followed by every router that has it.

A file that cannot be read any more changes nothing: the keys stay as they were, and the log says so. An edit replaces
the file as a whole, so that no reader sees a part of it.
"""

import asyncio
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from cluster_core.errors import ConfigError
from control_plane.access import api_keys
from control_plane.access.api_keys import ApiKey

logger = logging.getLogger(__name__)

_FIELD = "security.keys_file"
_MODE = 0o600
_Answer = TypeVar("_Answer")
# Inode, size and time of change: one that is replaced differs in the first.
_Stamp = tuple[int, int, int]


class KeyFile:
    """`read` once, then `follow` until cancelled, then `close`. keys: by id, replaced as a whole."""

    def __init__(self, path: Path, refresh_s: float) -> None:
        self.keys: Mapping[str, ApiKey] = MappingProxyType({})
        self._path = path
        self._refresh_s = refresh_s
        self._stamp: _Stamp | None = None
        # Of its own: that of the loop may have long prompts to tokenize.
        self._thread = ThreadPoolExecutor(1, "keys")

    def read(self) -> None:
        """Raises ConfigError."""
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            keys = read_keys(self._path)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror}", field=_FIELD) from None
        self.keys, self._stamp = MappingProxyType(keys), stamp

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def follow(self) -> None:
        """Whatever is wrong with the file, it is looked at again."""
        loop, is_bad = asyncio.get_running_loop(), False
        while True:
            await asyncio.sleep(self._refresh_s)
            try:
                await loop.run_in_executor(self._thread, self.read)
            except Exception as error:  # noqa: BLE001 - who is revoked has to stay out, whatever came before
                if not is_bad:
                    logger.error("keys stay as they are: %s", error)
                is_bad = True
                continue
            if is_bad:
                logger.warning("keys are as %s says again", self._path)
            is_bad = False


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
    """By the folder itself: a file for it would be somebody's, and keep others out."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
