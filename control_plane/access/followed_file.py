"""A file that is followed: read at the start, and again when it has changed.

One that cannot be read any more changes nothing: what it said goes on to hold, and the log says so.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from cluster_core.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Inode, size and time of change: one that is replaced differs in the first.
_Stamp = tuple[int, int, int]


class FollowedFile(Generic[T]):
    """`read` once, then `follow` until cancelled, then `close`. parse: of the file, and raises ConfigError, OSError.
    field: the setting that names it. value: what it says, replaced as a whole."""

    value: T

    def __init__(self, path: Path, parse: Callable[[Path], T], *, field: str, refresh_s: float) -> None:
        self._path = path
        self._parse = parse
        self._field = field
        self._refresh_s = refresh_s
        self._stamp: _Stamp | None = None
        # Of its own: that of the loop may have long prompts to tokenize.
        self._thread = ThreadPoolExecutor(1, "followed-file")

    def read(self) -> None:
        """Raises ConfigError."""
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self.value = self._parse(self._path)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror}", field=self._field) from None
        self._stamp = stamp

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
                    logger.error("%s stays as it was: %s", self._field, error)
                is_bad = True
                continue
            if is_bad:
                logger.warning("%s is as %s says again", self._field, self._path)
            is_bad = False


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
