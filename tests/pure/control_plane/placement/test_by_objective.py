"""Placement by the objectives, by hand: what each way is expected to cost, and which one is taken."""

import numpy as np
import pytest

from control_plane.placement.by_objective import (
    Choice,
    Objectives,
    Refusal,
    Way,
    bind,
    choices,
    decide,
    share_for_prompts,
)
from tests.pure.control_plane.placement.both_views import view

# A step may last 80 ms, a first token is planned within 0.95 s.
OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=0.1, alpha=0.8)


def taken(*workers: dict[str, float], refuses: bool = True) -> tuple[str, Way]:
    choice = decide(choices(view(*workers), OBJECTIVES), refuses=refuses)
    assert isinstance(choice, Choice)
    return choice.worker.worker_id, choice.way


@pytest.mark.parametrize(("step_s", "share"), [(0.0, 1.0), (0.02, 0.75), (0.06, 0.25), (0.08, 0.1), (1.0, 0.1)])
def test_the_share_for_prompts_is_what_decodes_leave_of_a_step_as_long_as_the_bound(
    step_s: float, share: float
) -> None:
    assert share_for_prompts(np.array([step_s]), OBJECTIVES)[0] == pytest.approx(share)


def test_ttft_is_expected_as_waiting_and_as_queue_and_own_work_at_the_share_for_prompts() -> None:
    (best, *_) = choices(view({"queue_s": 0.2, "own_s": 0.1, "step_s": 0.04, "wait_s": 0.05}), OBJECTIVES)
    assert best.ttft_s == pytest.approx(0.05 + (0.2 + 0.1) / 0.5)
    assert best.cost_s == pytest.approx(best.ttft_s + 2 * 0.1)


def test_a_request_stays_whole_where_it_fits() -> None:
    assert taken({}) == ("w0", Way.WHOLE)


def test_it_goes_to_the_worker_that_holds_its_conversation_though_others_are_idle() -> None:
    holder = {"cached_tokens": 900.0, "own_s": 0.01, "queue_s": 0.1}
    assert taken({}, holder) == ("w1", Way.APPEND)


def test_the_conversation_is_left_where_its_worker_would_miss_the_objective() -> None:
    assert taken({}, {"cached_tokens": 900.0, "own_s": 0.01, "queue_s": 1.0}) == ("w0", Way.WHOLE)


def test_it_is_prefilled_apart_where_its_decode_would_not_fit() -> None:
    """On the first worker decodes would be too slow; the second is longer at prompts than the objective allows."""
    assert taken({"step_with_s": 0.09}, {"queue_s": 2.0}) == ("w0", Way.APART)


def test_prefill_heavy_workers_only_prefill_and_are_taken_where_decodes_leave_others_little_time() -> None:
    assert taken({"heavy": 1}, {}) == ("w1", Way.WHOLE)
    assert taken({"heavy": 1}, {"step_s": 0.06, "step_with_s": 0.07}) == ("w0", Way.APART)


def test_what_is_late_anyway_waits_where_nobody_decodes_for_whom_it_would_be_computed_at_once() -> None:
    beside, alone = {"own_s": 3.0, "step_s": 0.01}, {"own_s": 3.0, "queue_s": 0.9}
    assert taken(beside, alone) == ("w1", Way.WHOLE)
    (_, *others) = choices(view(beside, alone), OBJECTIVES)
    assert [each.missed for each in others] == [1, 2, 2]


def test_it_waits_there_no_longer_than_the_first_token_of_others_may() -> None:
    assert taken({"own_s": 3.0, "step_s": 0.01}, {"own_s": 3.0, "queue_s": 4.0}) == ("w0", Way.WHOLE)
    assert taken({"own_s": 3.0, "step_s": 0.01}, {"own_s": 3.0, "heavy": 1, "queue_s": 100.0}) == ("w0", Way.WHOLE)


def test_it_stays_where_most_of_it_lies_if_all_of_it_would_take_longer_than_that() -> None:
    holder = {"own_s": 2.0, "step_s": 0.02, "cached_tokens": 800.0}
    assert taken(holder, {"own_s": 8.0, "heavy": 1.0}) == ("w0", Way.APPEND)


def test_it_is_not_refused_where_nothing_waits() -> None:
    """A prefill-heavy worker decodes what it was given before it was one."""
    busy = {"own_s": 3.0, "step_s": 0.05}
    assert taken({**busy, "heavy": 1.0}, busy) == ("w1", Way.WHOLE)
    waiting = {**busy, "queue_s": 0.1}
    assert isinstance(decide(choices(view({**waiting, "heavy": 1.0}, waiting), OBJECTIVES)), Refusal)


def test_a_step_that_is_too_long_everywhere_is_a_miss_for_whoever_prefills() -> None:
    assert {each.missed for each in choices(view({"step_with_s": 0.09}, {"step_with_s": 0.2}), OBJECTIVES)} == {1}


def test_what_cannot_keep_ttft_anywhere_is_refused_with_when_it_could() -> None:
    late = {"queue_s": 1.9}, {"queue_s": 1.4}
    refusal = decide(choices(view(*late), OBJECTIVES))
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after_s == pytest.approx(1.5 - 0.95)
    assert taken(*late, refuses=False) == ("w1", Way.WHOLE)


def test_a_prompt_that_takes_an_idle_worker_longer_than_ttft_is_not_refused() -> None:
    """It would be each time that it comes again."""
    assert taken({"own_s": 3.0, "queue_s": 1.0}, {"own_s": 3.0}) == ("w1", Way.WHOLE)


def test_it_may_wait_as_long_as_the_first_token_of_others_may_and_then_take_what_it_takes() -> None:
    late = {"own_s": 3.0, "queue_s": 0.9}
    assert taken(late) == ("w0", Way.WHOLE)
    refusal = decide(choices(view({**late, "queue_s": 1.2}), OBJECTIVES))
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after_s == pytest.approx(1.2 - 0.95)


def test_beside_decodes_a_late_prompt_takes_longer_and_is_not_refused_for_it_where_no_worker_is_for_prompts() -> None:
    """Half of the time of each is left, all the time: it would be refused for ever."""
    busy = {"own_s": 3.0, "step_s": 0.04}
    assert taken({**busy, "queue_s": 0.4}) == ("w0", Way.WHOLE)
    # Where one is prefill-heavy, the prompt waits for that one.
    heavy = {"own_s": 3.0, "heavy": 1.0}
    assert taken(busy, {**heavy, "queue_s": 0.9}) == ("w1", Way.APART)
    assert isinstance(decide(choices(view(busy, {**heavy, "queue_s": 1.0}), OBJECTIVES)), Refusal)


def test_a_prefill_heavy_worker_computes_whole_requests_where_no_other_may_get_them() -> None:
    heavy = {"heavy": 1.0}
    ways = {(each.row, each.way) for each in choices(view(heavy, {"passes": 0.0}), OBJECTIVES)}
    assert ways == {(0, Way.WHOLE), (0, Way.APART)}
    assert {each.way for each in choices(view(heavy, {}), OBJECTIVES) if each.row == 0} == {Way.APART}


def refusal(*workers: dict[str, float]) -> Refusal:
    found = decide(choices(view(*workers), OBJECTIVES))
    assert isinstance(found, Refusal)
    return found


def test_a_request_with_which_all_would_miss_tpot_comes_back_when_enough_answers_have_ended() -> None:
    full = {"step_with_s": 0.101, "fits_after_s": 0.4}
    found = refusal(full, full | {"fits_after_s": 0.3})
    assert found.retry_after_s == pytest.approx(0.3) and found.misses_tpot
    slow = full | {"alone_s": 0.11, "fits_after_s": 0.0}
    assert refusal(slow, full).retry_after_s == pytest.approx(0.4), "nothing decodes there that could end"
    absurd = full | {"own_s": float("inf"), "queue_s": float("inf"), "fits_after_s": float("inf")}
    assert refusal(absurd, full).retry_after_s == pytest.approx(0.4)
    late = refusal(full | {"queue_s": 2.0})
    assert late.retry_after_s == pytest.approx(2.1 - 0.95) and not late.misses_tpot, "it would be late as well"
    assert taken(full, {"queue_s": 0.5}) == ("w0", Way.APART), "the other one decodes it"
    assert taken(full, full, refuses=False) == ("w0", Way.WHOLE)


def test_what_a_step_computes_of_prompts_counts_where_all_would_miss_tpot() -> None:
    assert taken({"step_with_s": 0.1}) == ("w0", Way.WHOLE), "beyond the bound, and within TPOT"
    assert refusal({"step_with_s": 0.1, "least_s": 0.001}).misses_tpot


@pytest.mark.parametrize("alone_s", [0.101, float("inf"), float("nan")])
def test_who_misses_tpot_alone_as_well_is_not_refused_for_it(alone_s: float) -> None:
    assert taken({"step_with_s": 0.11, "alone_s": alone_s}) == ("w0", Way.WHOLE)


def test_what_is_late_for_what_decodes_alone_is_not_refused() -> None:
    """Half a second beside decodes that leave a quarter: it would be no other when it came back."""
    beside = {"own_s": 0.5, "step_s": 0.06}
    assert taken(beside, beside) == ("w0", Way.WHOLE)
    assert refusal(beside, beside | {"queue_s": 0.01}).retry_after_s == pytest.approx(2.0 - 0.95)
    assert refusal(beside | {"wait_s": 0.1}).retry_after_s == pytest.approx(2.1 - 0.95)


def test_a_worker_that_is_slow_by_itself_has_nobody_wait_longer() -> None:
    slow = {"own_s": 30.0}
    assert refusal(slow, {"queue_s": 1.0}).retry_after_s == pytest.approx(1.1 - 0.95)


def test_what_any_step_computes_is_left_for_prompts() -> None:
    step_s, least_s = np.array([0.06, 0.08, 0.0]), np.array([0.06, 0.001, 0.0])
    assert share_for_prompts(step_s, OBJECTIVES, least_s) == pytest.approx([0.5, 0.1, 1.0])


def test_a_worker_whose_figures_are_none_comes_last() -> None:
    never = {"own_s": float("nan"), "queue_s": float("inf")}
    assert taken(never, {"queue_s": 0.5}) == ("w1", Way.WHOLE)
    assert refusal(never, {"queue_s": 2.0}).retry_after_s == pytest.approx(2.1 - 0.95)


def test_who_may_not_get_the_request_is_no_choice() -> None:
    assert decide(choices(view({"passes": 0}), OBJECTIVES)) is None
    assert taken({"passes": 0}, {"queue_s": 0.5}) == ("w1", Way.WHOLE)


BINDINGS: dict[str, tuple[list[dict[str, float]], str, int]] = {
    "where it was prefilled, if all are alike": ([{}, {}, {}], "w1", 1),
    "elsewhere, if decodes are much slower there": ([{}, {"step_with_s": 0.07}, {}], "w1", 0),
    "not where prompts wait": ([{"queue_s": 0.9}, {"step_with_s": 0.07}, {"step_with_s": 0.02}], "w1", 2),
    "not where a step would exceed the bound": ([{"step_with_s": 0.081}, {"queue_s": 0.9}], "w0", 1),
    "not where it waits for a place, while another one has room": ([{"wait_s": 0.5}, {"step_with_s": 0.08}], "w0", 1),
    "where it waits, rather than where others miss TPOT": ([{"wait_s": 0.5}, {"step_with_s": 0.09}], "w0", 0),
    "where it waits, rather than where prompts are to be computed": ([{"wait_s": 0.4}, {"heavy": 1}], "w0", 0),
    "but not for long": ([{"wait_s": 0.9}, {"heavy": 1}], "w0", 1),
    "not on a worker that is to decode little": ([{"heavy": 1}, {"step_with_s": 0.03}], "w0", 1),
    "not where nobody knows how long it waits": ([{"wait_s": float("nan")}, {"step_with_s": 0.2}], "w0", 1),
    "nowhere, if none may": ([{"passes": 0}], "w0", -1),
}


@pytest.mark.parametrize("case", BINDINGS)
def test_at_the_first_token_a_decode_is_bound(case: str) -> None:
    workers, source, row = BINDINGS[case]
    assert bind(view(*workers), OBJECTIVES, source) == row
