"""Output of commands that run for weeks: what nobody takes any more is lost, and nothing else is.

A log file on a full disk and a reader that has gone raise in whoever prints, which may be on its way to take a service
down.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO


class LossyStream:
    """A text stream that loses what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lossy_output() -> Iterator[None]:
    """Of this process's standard output and error, while the block runs."""
    with redirect_stdout(LossyStream(sys.stdout)), redirect_stderr(LossyStream(sys.stderr)):
        yield
