"""The connector's own parameters: of a request that will be leased, and of a lease, as bytes between workers."""

import json
from typing import Any

from cluster_core.errors import InvalidInputError

# What vLLM expects of a request whose blocks another engine will pull.
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def encode_params(params: dict[str, Any]) -> bytes:
    return json.dumps(params, separators=(",", ":")).encode()


def decode_params(encoded: bytes) -> dict[str, Any]:
    """Raises InvalidInputError for bytes that no `encode_params` made."""
    try:
        params = json.loads(encoded)
    except (ValueError, RecursionError):
        raise InvalidInputError("is not valid JSON", field="handoff.connector_params") from None
    if not isinstance(params, dict):
        raise InvalidInputError("must be a table", field="handoff.connector_params")
    return params
