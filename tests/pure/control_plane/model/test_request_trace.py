"""The stages of a request have no gap whatever is recorded, and what workers say divides them without moving them."""

import random

import pytest

from control_plane.model.request_trace import MOST_EVENTS, MOST_STAGES, RequestTrace, TraceStage


def begun() -> RequestTrace:
    trace = RequestTrace()
    trace.begin(10.0)
    return trace


def stages(trace: RequestTrace, now_s: float = 100.0) -> list[tuple[TraceStage, float]]:
    return [(each.stage, round(each.ended_s - each.began_s, 6)) for each in trace.intervals(now_s)]


def test_a_stage_lasts_until_the_next_one_begins() -> None:
    trace = begun()
    trace.enter(TraceStage.TOKENIZATION, 11.0)
    trace.enter(TraceStage.TOKENIZATION, 11.5)
    trace.enter(TraceStage.ADMISSION, 13.0)
    trace.end(16.0, "finished")
    assert stages(trace) == [(TraceStage.INTAKE, 1.0), (TraceStage.TOKENIZATION, 2.0), (TraceStage.ADMISSION, 3.0)]


def test_what_a_worker_measured_is_the_last_part_of_its_call() -> None:
    trace = begun()
    trace.enter(TraceStage.PREFILL_CALL, 11.0, "prefill-0")
    trace.divide(20.0, (TraceStage.PREFILL_QUEUE, 2.0), (TraceStage.PREFILL_COMPUTE, 5.0))
    trace.enter(TraceStage.FIRST_TOKEN, 20.0)
    trace.end(21.0, "finished")
    assert stages(trace)[1:] == [
        (TraceStage.PREFILL_CALL, 2.0),
        (TraceStage.PREFILL_QUEUE, 2.0),
        (TraceStage.PREFILL_COMPUTE, 5.0),
        (TraceStage.FIRST_TOKEN, 1.0),
    ]
    assert [mark.worker_id for mark in trace.marks] == ["", *["prefill-0"] * 3, ""]


@pytest.mark.parametrize("measured", [(50.0, 50.0), (-3.0, 4.0), (0.0, 0.0)])
def test_a_worker_whose_clock_says_nonsense_changes_no_sum(measured: tuple[float, float]) -> None:
    trace = begun()
    trace.enter(TraceStage.DECODE_CALL, 11.0, "decode-0")
    trace.divide(15.0, (TraceStage.PULL, measured[0]), (TraceStage.DECODE_QUEUE, measured[1]))
    trace.enter(TraceStage.DECODE, 15.0, "decode-0")
    trace.end(18.0, "finished")
    trace.check_invariants()
    assert sum(took_s for _, took_s in stages(trace)) == pytest.approx(8.0)


def test_the_pause_of_a_migration_ends_when_the_answer_decodes_again() -> None:
    trace = begun()
    trace.enter(TraceStage.DECODE, 11.0, "decode-0")
    trace.left_worker(15.0, "it is gone")
    trace.enter(TraceStage.DECODE_PLACEMENT, 15.0)
    trace.enter(TraceStage.DECODE_CALL, 16.0, "decode-1")
    trace.enter(TraceStage.DECODE, 17.0, "decode-1")
    trace.enter(TraceStage.COMPLETION, 19.0)
    trace.end(20.0, "finished")
    assert trace.migrations == 1
    assert [each.stage for each in trace.intervals(20.0) if each.migrates] == [
        TraceStage.DECODE_PLACEMENT,
        TraceStage.DECODE_CALL,
    ]


def test_a_further_choice_is_of_the_same_trace_and_its_engines_spans_are_below_the_same_span() -> None:
    trace = begun()
    trace.trace_id, trace.span_id, trace.is_sampled = 0xABC, 0xDEF, True
    other = trace.another_choice()
    assert (other.trace_id, other.span_id, other.is_sampled) == (0xABC, 0xDEF, True)


def test_a_worker_lost_before_anything_was_decoded_is_no_migration() -> None:
    trace = begun()
    trace.enter(TraceStage.PREFILL_CALL, 11.0, "prefill-0")
    trace.left_worker(12.0, "it is gone")
    trace.enter(TraceStage.PLACEMENT, 12.0)
    assert trace.migrations == 0 and trace.events[0].name == "worker_lost"
    assert trace.marks[-1].attempt == 1


@pytest.mark.parametrize("seed", range(20))
def test_stages_add_up_and_are_bounded_whatever_is_recorded(seed: int) -> None:
    rng = random.Random(seed)
    trace, now_s = begun(), 10.0
    for _ in range(rng.randrange(400)):
        now_s += rng.choice((0.0, 0.001, 1.0))
        match rng.randrange(4):
            case 0:
                trace.enter(rng.choice(list(TraceStage)), now_s, rng.choice(("", "a", "b")))
            case 1:
                trace.divide(
                    now_s, (TraceStage.PULL, rng.uniform(-1, 3)), (TraceStage.DECODE_QUEUE, rng.uniform(-1, 3))
                )
            case 2:
                trace.left_worker(now_s, "x" * 1000)
            case _:
                trace.input_finished(now_s)
        trace.check_invariants()
    trace.end(now_s + 1, "finished")
    trace.check_invariants()
    assert len(trace.marks) <= MOST_STAGES and len(trace.events) <= MOST_EVENTS
    assert all(len(event.detail) <= 200 for event in trace.events)
