"""The settings of the decode scheduler: the configuration's section `decode`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from decode_worker.batch_shares import SLACK_TOKENS

KEY = "rachis_decode"


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Meaning and defaults are those of `cluster_configs.schema.DecodeSection`; slack_tokens is not configured."""

    policy: str = "heuristic"
    chunk_tokens: int = 64
    wait_bound_s: float = 2.0
    order_rows: bool = True
    guard: bool = True
    probe_interval_s: float = 30.0
    probe_s: float = 1.0
    fallback_s: float = 60.0
    policy_folder: str | None = None
    save_interval_s: float = 60.0
    slack_tokens: int = SLACK_TOKENS

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "BatchSettings":
        return cls(**{each.name: given[each.name] for each in fields(cls) if each.name in given})
