"""Output of commands that run for weeks: what nobody takes any more is lost, and nothing else is.

A log file on a full disk and a reader that has gone raise in whoever prints, which may be on its way to take a service
down.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO


class LossyStream:
    """A text stream that loses what cannot be written: OSError, or ValueError where it was closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # How often something was.
        self.lost = 0

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self.lost += 1
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self.lost += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lossy_output() -> Iterator[None]:
    """Of this process's standard output and error, while the block runs."""
    with ExitStack() as stack:
        # A process that was started without one of them has None there, which loses everything by itself.
        if sys.stdout is not None:
            stack.enter_context(redirect_stdout(LossyStream(sys.stdout)))
        if sys.stderr is not None:
            stack.enter_context(redirect_stderr(LossyStream(sys.stderr)))
        yield
