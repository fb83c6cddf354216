"""What a worker and the process of its engine tell each other over one socket.

A frame is the number of its bytes and a pickled list of messages; both ends are of one version, on one host, and of one
user, and nobody else has the socket. A message is its name and what belongs to it:

    to the engine           start, job, ask, left, follow, stop
    from the engine         phase, up, failed; tokens, item, progress, session_failed; answer; claims; died; logged

Outputs that have nothing but tokens and text travel as three values: of hundreds a step all but a few are such.
"""

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster_core.engine_jobs import EngineOutput
from cluster_core.engine_reports import EngineStatus
from worker_runtime.engine_settings import EngineSettings

Message = tuple[Any, ...]
HEADER = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to an engine's process. level: the least that it logs."""

    settings: EngineSettings
    level: int


@dataclass(frozen=True, slots=True)
class Frame:
    """From the engine. status: as it was before the messages; None: as in the frame before."""

    messages: Sequence[Message]
    status: EngineStatus | None = None
    stalled_s: float = 0.0


def encoded(value: object) -> bytes:
    text = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(text)) + text


def of_item(number: int, item: EngineOutput | Exception) -> Message:
    """An output, or why a job failed, of the stream with that number."""
    if isinstance(item, EngineOutput) and item.is_plain:
        return ("tokens", number, item.token_ids, item.text)
    return ("item", number, item)
