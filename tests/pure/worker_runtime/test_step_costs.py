"""What work costs, from made-up measurements."""

from unittest import mock

import numpy as np
import pytest

from cluster_core.engine_reports import EngineCosts
from worker_runtime.step_costs import StepCosts


def test_nothing_is_known_before_anything_was_measured() -> None:
    assert StepCosts().costs() == EngineCosts()


def test_steps_that_only_decode_give_the_time_of_a_step_and_the_others_that_of_prefill() -> None:
    costs = StepCosts()
    for _ in range(5):
        costs.stepped(0.02, [], 2)
        costs.stepped(1.0, [], 0)
        for before, tokens in ((0, 100), (0, 1000), (4000, 1000), (100, 3000), (20_000, 50)):
            seconds = 0.01 + tokens * 1e-3 + tokens * (before + tokens / 2) * 1e-7
            costs.stepped(seconds, [(before, tokens)], 0)
            # 0.02 of it for who decodes.
            costs.stepped(0.02 + seconds, [(before, tokens)], 2)

    found = costs.costs()
    assert found.decode_step_s == pytest.approx(0.02)
    assert found.prefill_s == pytest.approx(0.01, rel=0.2)
    assert found.prefill_s_per_token == pytest.approx(1e-3, rel=0.02)
    assert found.prefill_s_per_pair == pytest.approx(1e-7, rel=0.02)


def test_steps_that_only_decode_tell_apart_what_a_request_and_what_its_context_costs() -> None:
    costs = StepCosts()
    for requests, context in ((1, 100), (4, 800), (16, 1600), (16, 20_000), (64, 9000), (2, 30_000)) * 20:
        costs.stepped(0.005 + requests * 1e-4 + context * 1e-7, [], requests, context)
    found = costs.costs()
    assert found.decode_s == pytest.approx(0.005, rel=0.05)
    assert found.decode_s_per_request == pytest.approx(1e-4, rel=0.05)
    assert found.decode_s_per_token == pytest.approx(1e-7, rel=0.05)


def test_decode_steps_of_one_size_are_priced_right_whatever_is_the_cause() -> None:
    costs = StepCosts()
    for _ in range(10):
        costs.stepped(0.02, [], 8, 4000)
    found = costs.costs()
    priced = found.decode_s + 8 * found.decode_s_per_request + 4000 * found.decode_s_per_token
    assert priced == pytest.approx(0.02, rel=1e-3)


def test_what_tokens_cost_is_seen_in_steps_that_a_bound_makes_equally_long() -> None:
    """The more decodes, the fewer tokens of prompts, and the step lasts 14 ms whatever it computes."""
    costs = StepCosts()
    for requests in (2, 60, 20, 100, 40) * 40:
        decode_s = 0.005 + requests * 5e-5
        costs.stepped(decode_s, [], requests)
        tokens = (0.014 - decode_s) / 25e-6
        costs.stepped(0.014, [(4000, round(tokens))], requests)
    found = costs.costs()
    for tokens in (160, 320):
        pairs = tokens * (4000 + tokens / 2)
        priced = found.prefill_s + tokens * found.prefill_s_per_token + pairs * found.prefill_s_per_pair
        assert priced == pytest.approx(tokens * 25e-6, rel=0.1)


def test_a_long_prompt_is_priced_right_after_a_thousand_short_pieces() -> None:
    def seconds(before: int, tokens: int) -> float:
        return 0.002 + tokens * 25e-6 + tokens * (before + tokens / 2) * 1e-9

    costs = StepCosts()
    for before in range(0, 80_000, 8000):
        costs.stepped(seconds(before, 8000), [(before, 8000)], 0)
    for _ in range(1000):
        costs.stepped(seconds(100, 300), [(100, 300)], 0)
    found = costs.costs()
    priced = found.prefill_s + 80_000 * found.prefill_s_per_token + 80_000**2 / 2 * found.prefill_s_per_pair
    assert priced == pytest.approx(0.002 + 80_000 * 25e-6 + 80_000**2 / 2 * 1e-9, rel=0.05)


def test_pieces_of_one_size_do_not_make_a_long_prompt_seem_to_take_no_time_where_decodes_tell_what_any_step_takes() -> (
    None
):
    """Conversations continued by pieces of about one length: their steps do not tell tokens from what is fixed."""
    costs = StepCosts()
    for number in range(40):
        costs.stepped(0.008 + 4 * 5e-5, [], 4, 4 * 60_000)
        tokens = 1990 + number % 3
        costs.stepped(0.006 + tokens * 25e-6 + tokens * (60_000 + tokens / 2) * 1e-9, [(60_000, tokens)], 0)
    found = costs.costs()
    priced = found.prefill_s + 130_000 * found.prefill_s_per_token + 130_000**2 / 2 * found.prefill_s_per_pair
    assert priced == pytest.approx(130_000 * 25e-6 + 130_000**2 / 2 * 1e-9, rel=0.5)
    piece = found.prefill_s + 2000 * found.prefill_s_per_token + 2000 * 61_000 * found.prefill_s_per_pair
    assert piece == pytest.approx(0.178, rel=0.02), "and what came is priced right"


def test_what_was_measured_of_one_size_fades_with_steps_of_others() -> None:
    """A GPU that has become twice as fast is believed, though nothing long has come since."""
    costs = StepCosts()
    for factor, sizes, rounds in ((2, (100, 1000, 8000), 20), (1, (100, 1000), 8000)):
        for tokens in sizes * rounds:
            costs.stepped(factor * (0.002 + tokens * 25e-6), [(0, tokens)], 0)
    found = costs.costs()
    priced = found.prefill_s + 1000 * found.prefill_s_per_token + 500_000 * found.prefill_s_per_pair
    assert priced == pytest.approx(0.027, rel=0.05)


def test_prompts_in_one_step_add_up() -> None:
    costs = StepCosts()
    for first, second in ((100, 200), (1000, 50), (400, 3000)):
        costs.stepped((first + second) * 1e-3, [(0, first), (500, second)], 0)
    assert costs.costs().prefill_s_per_token == pytest.approx(1e-3, rel=0.02)


def test_prompts_of_one_size_are_priced_right_whatever_is_the_cause() -> None:
    costs = StepCosts()
    for _ in range(10):
        costs.stepped(0.5, [(0, 1000)], 0)
    found = costs.costs()
    priced = found.prefill_s + 1000 * found.prefill_s_per_token + 500_000 * found.prefill_s_per_pair
    assert priced == pytest.approx(0.5, rel=1e-3)
    assert min(found.prefill_s, found.prefill_s_per_token, found.prefill_s_per_pair) >= 0


def test_old_measurements_fade() -> None:
    costs = StepCosts()
    for seconds in (1.0, 0.1):
        for _ in range(400):
            costs.stepped(seconds, [(0, 10)], 0)
    found = costs.costs()
    priced = found.prefill_s + 10 * found.prefill_s_per_token + 50 * found.prefill_s_per_pair
    assert priced == pytest.approx(0.1, rel=0.01)


def test_pulls_of_several_sizes_tell_the_fixed_part_apart() -> None:
    costs = StepCosts()
    for tokens in (100, 1000, 400, 5000):
        costs.pulled(0.003 + tokens * 1e-5, tokens)

    assert costs.costs().pull_s == pytest.approx(0.003)
    assert costs.costs().pull_s_per_token == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("pulls", "fixed", "each"),
    [
        ([(0.01, 100), (0.01, 100)], 0.0, 1e-4),
        ([(0.02, 100), (0.01, 1000)], 0.015, 0.0),
        ([(0.0, 100), (0.03, 200)], 0.0, 1.2e-4),
    ],
)
def test_neither_part_of_a_pull_is_negative(pulls: list[tuple[float, int]], fixed: float, each: float) -> None:
    costs = StepCosts()
    for seconds, tokens in pulls:
        costs.pulled(seconds, tokens)

    assert costs.costs().pull_s == pytest.approx(fixed, rel=0.02)
    assert costs.costs().pull_s_per_token == pytest.approx(each, rel=0.02)


def test_loads_are_told_as_totals() -> None:
    costs = StepCosts()
    costs.loaded(0.5, 100)
    costs.loaded(0.5, 100)
    costs.loaded(1.0, 200)

    assert costs.costs().load_s_per_token == pytest.approx(0.005)


def test_small_pieces_do_not_make_a_long_prompt_seem_dear() -> None:
    """Who seems slow gets no prompts, and never learns better: 130,000 tokens take 12 s here."""
    costs = StepCosts()
    for _ in range(20):
        for before, tokens in ((60_000, 10), (20_000, 30), (65_000, 12)):
            costs.stepped(0.007 + tokens * 2e-5 + tokens * before * 5e-10, [(before, tokens)], 0)
    found = costs.costs()
    long_s = found.prefill_s + 130_000 * found.prefill_s_per_token + 130_000**2 / 2 * found.prefill_s_per_pair
    assert long_s < 20


def test_one_token_of_a_prompt_is_a_decode() -> None:
    """Of one that is cached, or whose KV was pulled."""
    costs = StepCosts()
    for _ in range(20):
        costs.stepped(0.008, [(60_000, 1)], 0)
        costs.stepped(0.010, [(60_000, 1)], 3, 30_000)
    found = costs.costs()
    assert (found.prefill_s, found.prefill_s_per_token, found.prefill_s_per_pair) == (0.0, 0.0, 0.0)
    assert found.decode_s + 4 * found.decode_s_per_request + 90_000 * found.decode_s_per_token == pytest.approx(
        0.010, rel=0.02
    )
    # Beside a prompt it is one as well.
    costs.stepped(0.110, [(0, 1000), (60_000, 1)], 3, 30_000)
    found = costs.costs()
    assert found.prefill_s + 1000 * found.prefill_s_per_token + 5e5 * found.prefill_s_per_pair == pytest.approx(
        0.1, rel=0.02
    )


def test_an_engine_that_tells_its_costs_after_every_step_solves_them_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solve = mock.Mock(wraps=np.linalg.solve)
    # The library's call is what takes long, and nothing tells how often it was made.
    monkeypatch.setattr(np.linalg, "solve", solve)
    costs, steps = StepCosts(), 1000
    for step in range(steps):
        costs.stepped(0.004 + 0.001 * (step % 8), [], 1 + step % 8, 100 * (1 + step % 8))
        told = costs.costs()
        if step < 16:
            assert solve.call_count > step, "early steps say much"
    assert solve.call_count < steps / 8
    found = told.decode_s + 4 * told.decode_s_per_request + 400 * told.decode_s_per_token
    assert found == pytest.approx(0.007, rel=0.01)


def test_what_a_first_step_of_a_size_took_is_no_price_for_long() -> None:
    """It compiles, or warms up; the next ones tell, though steps are many by then."""
    costs = StepCosts()
    for tokens, seconds in [(200, 0.005)] * 320 + [(2000, 5.0)] + [(2000, 0.03)] * 5:
        costs.stepped(seconds, [(0, tokens)], 0)
        told = costs.costs()
    afresh = StepCosts()
    for tokens, seconds in [(200, 0.005)] * 320 + [(2000, 5.0)] + [(2000, 0.03)] * 5:
        afresh.stepped(seconds, [(0, tokens)], 0)
    assert told == afresh.costs()


def test_what_steps_of_several_sizes_have_shown_to_be_fixed_is_whatever_decodes_take() -> None:
    """Decodes in graphs of 6 ms beside prefills that are launched kernel by kernel."""
    costs = StepCosts()
    for _ in range(8):
        for requests in (1, 4, 16):
            costs.stepped(0.006 + requests * 1e-5, [], requests, requests * 1000)
        for tokens in (32, 128, 512, 2048, 8192):
            costs.stepped(0.02 + tokens * 25e-6 + tokens * tokens / 2 * 1e-9, [(0, tokens)], 0)
    found = costs.costs()
    assert found.prefill_s == pytest.approx(0.02, rel=0.05)
    assert found.prefill_s_per_token == pytest.approx(25e-6, rel=0.05)
