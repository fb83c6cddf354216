"""Who changed what, when, and how it ended: a line of JSON for each administrative call, in a file of its own."""

import json
import logging
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from cluster_core.clock import unix_ms
from cluster_core.errors import ConfigError
from control_plane.access.roles import Identity

logger = logging.getLogger(__name__)

_STRANGERS_APART_MS = 1000


class AuditLog:
    """path: of the file; None: nothing is written. One that is moved away is begun anew."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError."""
        self._handler: WatchedFileHandler | None = None
        # When a call of a stranger was written last, and how many were not since then.
        self._stranger_ms = -_STRANGERS_APART_MS
        self._unwritten = 0
        if path is None:
            return
        try:
            self._handler = WatchedFileHandler(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", field="security.audit_file") from None

    @property
    def is_on(self) -> bool:
        return self._handler is not None

    def write(self, caller: Identity | None, address: str, method: str, request: object, status: str) -> None:
        """caller: None where nobody was logged in; of those a line each second says how many more there were. request:
        the message; what is none is left out."""
        if self._handler is None:
            return
        now_ms = unix_ms()
        if caller is None:
            # Anybody may make such calls, as many as they like.
            if 0 <= now_ms - self._stranger_ms < _STRANGERS_APART_MS:
                self._unwritten += 1
                return
            self._stranger_ms = now_ms
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            "key": caller.name if caller is not None else None,
            "tenant": caller.tenant if caller is not None else None,
            "address": address,
            "call": method.rpartition("/")[2],
            "request": MessageToDict(request, preserving_proto_field_name=True)
            if isinstance(request, Message)
            else None,
            "status": status,
        }
        if caller is None and self._unwritten:
            line["unwritten"], self._unwritten = self._unwritten, 0
        try:
            self._handler.handle(logging.makeLogRecord({"msg": "%s", "args": (json.dumps(line),)}))
        except OSError as error:
            # The call has been carried out, whatever becomes of its line.
            logger.error("an administrative call is not written down: %s: %s", error, line)

    def close(self) -> None:
        if self._handler is not None:
            self._handler.close()
