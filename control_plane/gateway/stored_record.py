"""A stored response as bytes: the conversation to its end, and the response as its client was given it.

Pure: what Redis is asked is in `stored_responses`.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from control_plane.gateway.kept_responses import Item

# What a version does not know, it does not read: its client sends the conversation again.
_VERSION = 1
_ID = re.compile(r"resp_[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class Record:
    """items: the conversation to the response's end. response: the object of the API."""

    response_id: str
    items: tuple[Item, ...]
    response: dict[str, Any]
    # Whose it is; empty in a service without keys.
    tenant: str = ""


def is_response_id(given: str) -> bool:
    return _ID.fullmatch(given) is not None


def written(record: Record) -> bytes:
    whole = {"version": _VERSION, "items": record.items, "response": record.response, "tenant": record.tenant}
    # Half of a surrogate pair, which JSON may have, comes back as it was.
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")


def read(response_id: str, value: bytes) -> Record | None:
    """None where it is none of this version."""
    try:
        whole = json.loads(value)
    except ValueError:
        return None
    if not isinstance(whole, dict) or whole.get("version") != _VERSION:
        return None
    return Record(response_id, tuple(whole["items"]), whole["response"], whole.get("tenant", ""))
