"""Output that nobody takes, in every way."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

BROKEN_STREAMS = ("full disk", "reader that has gone", "closed", "no stream")


@contextmanager
def broken_stream(how: str) -> Iterator[TextIO | None]:
    if how == "no stream":
        yield None
        return
    if how == "full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, descriptor = os.pipe()
        os.close(reading)
    stream = os.fdopen(descriptor, "w", buffering=1)
    if how == "closed":
        stream.close()
    try:
        yield stream
    finally:
        with suppress(OSError):
            stream.close()
