"""The terms of the tiers: what is copied to host memory or why not, the plans of copies, and what is counted."""

from dataclasses import dataclass, field
from enum import StrEnum

from cluster_core.engine_jobs import NOBODY, TenantShare
from kv_transfer.blocks import BlockHash


class Admission(StrEnum):
    """What is copied to host memory."""

    NONE = "none"
    EVERYTHING = "everything"
    SELECTIVE = "selective"


class Refusal(StrEnum):
    """Why a device block was not copied to host memory."""

    FREQUENCY = "frequency"
    UNPROMISING = "unpromising"
    COLDER_THAN_HOST = "colder_than_host"
    HOST_LOCKED = "host_locked"


@dataclass(frozen=True, slots=True)
class TierRules:
    """What is copied out, and what is brought back."""

    admission: Admission = Admission.SELECTIVE
    # Accesses before a block may be worth a copy (selective only).
    frequency_threshold: int = 2
    promotion: bool = True
    # Brought back at once, at most.
    promotion_blocks: int = 64
    # While promotions are in vain, one in so many prefills is looked for at most; 0: one in each.
    promotion_pause: int = 1024


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Device blocks to host slots: blocks `first` and following of the prefix `hashes`, which ends with the last.

    All of them are of one owner.
    """

    hashes: tuple[BlockHash, ...]
    first: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    tenant: TenantShare = NOBODY


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks `first` and following of a waiting request's prefix, from these slots to blocks of its own.

    is_swapped: the slots are not the tree's but the request's, which was swapped out: nobody else reads them, and the
    last one may be of a block that is not full.
    """

    request_id: str
    hashes: tuple[BlockHash, ...]
    first: int
    slots: tuple[int, ...]
    is_swapped: bool = False


@dataclass(frozen=True, slots=True)
class Promotion:
    """Host slots to as many device blocks that the caller takes from the pool, for blocks `first` and following."""

    hashes: tuple[BlockHash, ...]
    first: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class TierCounters:
    """Blocks since the start, unless the name says otherwise."""

    # Of requests that have begun, and what of them was not computed.
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    copied_out: int = 0
    # Promotions among it, and swapped sessions that have come back beside steps.
    copied_back: int = 0
    # Of these, for requests that waited for them while steps computed others.
    copied_back_async: int = 0
    copies_failed: int = 0
    # What the copies in the background took, all workers of the engine together.
    copy_out_s: float = 0.0
    copy_back_s: float = 0.0
    # Blocks of those copies.
    timed: int = 0
    promoted: int = 0
    # Promoted blocks that a prompt asked for before they left the device, and those that none did.
    promotions_used: int = 0
    promotions_wasted: int = 0
    evicted_device: int = 0
    evicted_host: int = 0
    # Of these, of tenants that claimed room while others did so as well.
    evicted_device_for_others: int = 0
    evicted_host_for_others: int = 0
    # Offers of a prefix to host memory that ended at a block which was refused.
    refused: dict[Refusal, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))
