"""Whose one of vLLM's requests is."""

from typing import Any

from cluster_core.engine_jobs import NOBODY, TENANT_ARG, TenantShare


def tenant_of(request: Any) -> TenantShare:
    """Nobody's where nothing is said."""
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    share: TenantShare = (extra or {}).get(TENANT_ARG, NOBODY)
    return share
