"""What requests are meant to keep, by their class. Pure.

Requests of a priority above 0 are best effort: whoever asks for an answer by tomorrow has no use for the objectives of
somebody who waits for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class RequestClass(StrEnum):
    """By priority, as everywhere."""

    INTERACTIVE = "interactive"
    BEST_EFFORT = "best_effort"


@dataclass(frozen=True, slots=True)
class ClassObjectives:
    """Time to first token, and time for each token after it; 0: no objective for these."""

    ttft_s: float
    tpot_s: float


ObjectivesByClass = Mapping[RequestClass, ClassObjectives]


def class_of(priority: int) -> RequestClass:
    """priority: the lowest number is served first."""
    return RequestClass.BEST_EFFORT if priority > 0 else RequestClass.INTERACTIVE


def is_best_effort(priority: int) -> bool:
    return class_of(priority) is RequestClass.BEST_EFFORT


def objectives_by_class(section: Mapping[str, Any]) -> ObjectivesByClass:
    """section: `objectives` of the configuration. What it leaves open of best effort is that of the others."""
    own = ClassObjectives(section["ttft_s"], section["tpot_s"])
    given = section.get("best_effort") or {}
    ttft_s, tpot_s = given.get("ttft_s"), given.get("tpot_s")
    return {
        RequestClass.INTERACTIVE: own,
        RequestClass.BEST_EFFORT: ClassObjectives(
            own.ttft_s if ttft_s is None else ttft_s, own.tpot_s if tpot_s is None else tpot_s
        ),
    }
