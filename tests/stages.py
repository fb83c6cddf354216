"""What the trace of a request has to tell: the stages of the way that it went, in order, and times that others say too.

Stages add up by construction: each begins where the one before ends. What could be wrong all the same is that a part
forgets its stage, so that the one before it lasts too long, or names another worker. Hence a way is compared with a
literal table, and a stage's ends with what was written down elsewhere: the completion's timings, which the journey
keeps for itself, its route, and the client's own watch. All are readings of one clock; none says how long something may
take.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation

# Whatever is added up: readings of a clock in seconds, told in milliseconds.
ROUNDING_MS = 1e-3
# What workers have measured divides a call, and may take all of it: a part of a call stands for the call.
_CALL_OF = {
    "prefill_call": "prefill",
    "prefill_queue": "prefill",
    "prefill_compute": "prefill",
    "decode_call": "take over",
    "pull": "take over",
    "decode_queue": "take over",
}
_INTAKE = ("intake", "tokenization", "admission")
_DECODED = ("decode_placement", "take over", "decode", "completion")
WAYS = {
    "both pools": (*_INTAKE, "placement", "prefill", "first_token", *_DECODED),
    "one token": (*_INTAKE, "placement", "prefill", "first_token", "completion"),
    "session": (*_INTAKE, "placement", "input", "prefill", "first_token", *_DECODED),
    "whole": (*_INTAKE, "placement", "decode_placement", "take over", "prefill", "decode", "completion"),
    "further choice": (*_INTAKE, "first_choice", "placement", "prefill", "first_token", *_DECODED),
    "migrated": (
        *_INTAKE, "placement", "prefill", "first_token", "decode_placement", "take over", "decode",
        "placement", "prefill", "first_token", *_DECODED,
    ),
    "malformed": ("intake",),
    "too long": ("intake", "tokenization"),
}  # fmt: skip


def adds_up(answer: admin.AnswerTrace) -> None:
    """No stage is without length, none overlaps another, and together they are the whole."""
    stages = answer.stages
    assert all(stage.duration_ms > 0 for stage in stages), stages
    assert stages[0].start_ms == 0
    ends_ms = [stage.start_ms + stage.duration_ms for stage in stages]
    for (_, before_ms), (after, _) in pairwise(zip(stages, ends_ms, strict=True)):
        assert before_ms == pytest.approx(after.start_ms, abs=ROUNDING_MS)
    assert ends_ms[-1] == pytest.approx(answer.end_to_end_ms, abs=ROUNDING_MS)
    assert sum(stage.duration_ms for stage in stages) == pytest.approx(answer.end_to_end_ms, abs=ROUNDING_MS)


def has_left(answer: admin.AnswerTrace) -> bool:
    """A worker was lost under it, as an event and the stages after it say: of those its way has more."""
    has_lost = any(event.name == "worker_lost" for event in answer.events)
    assert has_lost == any(stage.attempt > 0 for stage in answer.stages), answer
    return has_lost


def went(answer: admin.AnswerTrace, way: Sequence[str]) -> None:
    """Its stages are those of the way (`WAYS`), all of them, in order."""
    adds_up(answer)
    parts = [name for name, _ in groupby(_CALL_OF.get(stage.name, stage.name) for stage in answer.stages)]
    assert tuple(parts) == tuple(way), [stage.name for stage in answer.stages]


def agrees(answer: admin.AnswerTrace, completion: generation.Completion, took_ms: float = float("inf")) -> None:
    """Of an answer that no worker was lost under. took_ms: what the client waited for the completion."""
    stages, timings, route = answer.stages, completion.timings, completion.route
    (made,) = [stage for stage in stages if stage.name == "completion"]
    whole_ms = timings.queue_ms + timings.prefill_ms + timings.decode_ms
    assert made.start_ms == pytest.approx(whole_ms, abs=ROUNDING_MS), "the journey knows of the same time"
    assert made.start_ms <= took_ms, "its client waited for all of it"

    first = next(stage for stage in stages if stage.name in ("first_token", "decode"))
    assert first.start_ms - ROUNDING_MS <= timings.ttft_ms <= first.start_ms + first.duration_ms + ROUNDING_MS

    pulls = [stage for stage in stages if stage.name == "pull"]
    has_rest = any(stage.name == "decode_call" for stage in stages)
    if pulls and has_rest:
        assert pulls[0].duration_ms == pytest.approx(timings.transfer_ms, abs=ROUNDING_MS), "as its worker measured"

    prefills, decodes = _workers(stages, "prefill"), _workers(stages, "take over") | _workers(stages, "decode")
    assert prefills == {route.prefill_worker_id or route.decode_worker_id}
    assert decodes == ({route.decode_worker_id} if route.decode_worker_id else set())
    placing = {stage.worker_id for stage in stages if stage.name in ("placement", "decode_placement")}
    assert placing == {""}, "nobody has it yet"


def _workers(stages: Sequence[admin.TraceStage], part: str) -> set[str]:
    return {stage.worker_id for stage in stages if _CALL_OF.get(stage.name, stage.name) == part}
