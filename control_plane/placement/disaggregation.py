"""Whether a prompt is prefilled on a prefill worker, or by the decode worker itself. Pure.

Both ways are priced in seconds until the request decodes, by what the workers measured. A decode worker that prefills
keeps the requests waiting that run there: their seconds count like the request's own.
"""

from dataclasses import dataclass
from enum import StrEnum

from control_plane.placement.policy import Decision, Question
from control_plane.placement.terms import expected_ttft_s, prefill_s

# A longer remainder than is allowed is prefilled locally where the other way takes so many times as long.
_SLOW = 2.0


class Reason(StrEnum):
    """Why a request was, or was not, disaggregated."""

    ALWAYS = "always"
    REMOTE_SOONER = "remote_sooner"
    LONG_REMAINDER = "long_remainder"
    SHORT_REMAINDER = "short_remainder"
    PREFILL_SLOW = "prefill_slow"
    PREFILL_DOWN = "prefill_down"
    DECODE_DOWN = "decode_down"
    SESSION = "session"
    WHOLE = "whole"


LOCAL = frozenset({Reason.SHORT_REMAINDER, Reason.PREFILL_SLOW, Reason.PREFILL_DOWN, Reason.WHOLE})


@dataclass(frozen=True, slots=True)
class Prices:
    """What the two ways cost."""

    # Until the request decodes.
    local_s: float
    remote_s: float
    # Prompt tokens that the decode worker would compute.
    remainder_tokens: int


def prices(prefill: Decision, decode: Decision, question: Question) -> Prices:
    """Of the two winners, which have to be there."""
    row, view = decode.winner, decode.view
    workers = view.candidates
    compute_s = float(prefill_s(question, view)[row])
    local_s = float(workers.queue_s[row]) + compute_s * (1.0 + float(workers.in_flight_requests[row]))
    pulled = max(question.prompt_tokens - float(view.device[row]), 0.0)
    pull_s = float(workers.fixed.pull_s[row] + pulled * workers.fixed.pull_s_per_token[row])
    remote_s = float(expected_ttft_s(question, prefill.view)[prefill.winner]) + pull_s
    return Prices(local_s, remote_s, round(float(view.uncached(question.prompt_tokens)[row])))


def reason_for(price: Prices, most_local_tokens: int) -> Reason:
    """most_local_tokens: see `placement.local_prefill_tokens`."""
    if price.remainder_tokens <= most_local_tokens:
        return Reason.SHORT_REMAINDER if price.local_s < price.remote_s else Reason.REMOTE_SOONER
    return Reason.PREFILL_SLOW if price.local_s * _SLOW < price.remote_s else Reason.LONG_REMAINDER
