"""Keys of a terminal, by name, as they are pressed."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

_SEQUENCES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
_CHARACTERS = {
    "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x1b": "escape", "\x03": "ctrl-c", "\x04": "q",
}  # fmt: skip
_LONGEST = 64


def names_of(text: str) -> Iterator[str]:
    """Of what was read at once: several keys may have come, and one may be several characters."""
    while text:
        sequence = next((each for each in _SEQUENCES if text.startswith(each)), None)
        if sequence is not None:
            yield _SEQUENCES[sequence]
        else:
            yield _CHARACTERS.get(text[0], text[0])
        text = text[len(sequence or text[0]) :]


@contextmanager
def keyboard(keys: "asyncio.Queue[str]") -> Iterator[None]:
    """Keys go into the queue as they are pressed, without being shown. Within a running loop, of a terminal."""
    stdin, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        text = os.read(stdin, _LONGEST).decode(errors="replace")
        if not text:
            # The terminal is gone.
            loop.remove_reader(stdin)
        for name in names_of(text or "\x04"):
            keys.put_nowait(name)

    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    loop.add_reader(stdin, read)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
