"""What a model's KV rules out, and why: nothing that is configured is off without a word.

A layer with a sliding window or a state keeps no list of all blocks of a request, and vLLM computes prompts of some
models in one piece on a CPU. One literal table says what each feature needs; whoever has to know asks it, and a worker
reports what is missing with its model (`rachis.v1.ModelInfo`). Figures by model family: docs/models.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Feature(StrEnum):
    """What some models cannot have. Hand-off between the pools is none of them: a model without it does not start."""

    PREFIX_CACHE = "prefix cache"
    PREFIX_INDEX = "prefix index"
    TIERS = "tiers"
    SESSIONS = "sessions"
    DECODE_BATCHES = "decode batches"
    HAND_OVER = "hand-over"
    CONTENT_CHECK = "content check"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How one engine keeps a request's KV. kinds: of its groups of layers, as vLLM calls them."""

    kinds: tuple[str, ...]
    # All layers have full attention: a request's KV is one list of blocks, each of them kept until it ends.
    is_one_list: bool
    has_full_attention: bool
    keeps_prefixes: bool
    computes_in_pieces: bool


@dataclass(frozen=True, slots=True)
class Need:
    """reason: in what it is short of, with the kinds of groups."""

    is_met: Callable[[KvLayout], bool]
    reason: str


_ONE_LIST = Need(lambda kv: kv.is_one_list, "this model's KV is not one list of blocks ({kinds})")
_FULL = Need(lambda kv: kv.has_full_attention, "none of this model's layers has full attention ({kinds})")
_PREFIXES = Need(lambda kv: kv.keeps_prefixes, "vLLM keeps no prefixes of this model on this device")
_PIECES = Need(lambda kv: kv.computes_in_pieces, "vLLM computes this model's prompts in one piece on this device")

NEEDS: Mapping[Feature, tuple[Need, ...]] = {
    Feature.PREFIX_CACHE: (_PREFIXES,),
    Feature.PREFIX_INDEX: (_FULL, _PREFIXES),
    Feature.TIERS: (_ONE_LIST, _PREFIXES),
    # What has been computed of a prompt is gone on from, or cut off.
    Feature.SESSIONS: (_ONE_LIST, _PIECES),
    Feature.DECODE_BATCHES: (_ONE_LIST,),
    Feature.HAND_OVER: (_ONE_LIST,),
    Feature.CONTENT_CHECK: (_ONE_LIST,),
}


def missing_features(layout: KvLayout) -> dict[str, str]:
    """By feature, the reason; empty where the model can have all."""
    kinds = _counted(layout)
    missing = {}
    for feature, needs in NEEDS.items():
        unmet = [need for need in needs if not need.is_met(layout)]
        if unmet:
            missing[feature.value] = unmet[0].reason.format(kinds=kinds)
    return missing


def allows(layout: KvLayout, feature: Feature) -> bool:
    return all(need.is_met(layout) for need in NEEDS[feature])


def _counted(layout: KvLayout) -> str:
    """3 SlidingWindow and 1 FullAttention."""
    counts = {kind: layout.kinds.count(kind) for kind in layout.kinds}
    return " and ".join(f"{count} {kind}" for kind, count in counts.items())
