"""Names of requests, workers and services."""

import hashlib
import re
import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
ServiceId = NewType("ServiceId", str)

# The environment variable by which every process of a service carries the mark of its start.
SERVICE_VARIABLE = "RACHIS_SERVICE"
_OF_ONE_START = re.compile(r"svc-[0-9a-f]{8}")


def new_request_id() -> RequestId:
    return RequestId(f"req-{secrets.token_hex(8)}")


def new_service_id() -> ServiceId:
    """Of one start alone, where its configuration gives no name."""
    return ServiceId(f"svc-{secrets.token_hex(4)}")


def is_of_one_start(service_id: str) -> bool:
    return _OF_ONE_START.fullmatch(service_id) is not None


def new_start_mark(service_name: str) -> str:
    """What the processes of one start of a service carry: no other start of that name, here or elsewhere, has it."""
    return f"{service_name}-{secrets.token_hex(4)}"


def worker_id(pool: str, index: int) -> WorkerId:
    """A worker keeps its name when it is restarted; its generation tells the starts apart."""
    return WorkerId(f"{pool}-{index}")


def registry_digest(redis_url: str) -> str:
    """Says which Redis without saying where it is, or its password."""
    return hashlib.sha256(redis_url.encode()).hexdigest()[:16]
