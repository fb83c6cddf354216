"""What vLLM's connector has noted of a request whose KV another engine has computed."""

from typing import Any


def pulls(request: Any) -> bool:
    """Whether its KV is to be pulled, and no pull has begun: a connector takes the note away when one begins."""
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
