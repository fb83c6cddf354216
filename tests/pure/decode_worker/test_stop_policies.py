"""Each policy by its rule, and what a saved table may contain."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import log, sqrt
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.stop_policies import (
    POLICIES,
    Action,
    Bandit,
    BatchState,
    Decision,
    PolicySettings,
    QLearning,
    StopPolicy,
)
from tests.examples import examples

ADD, STOP = Action.ADD, Action.STOP
LEARNED = ("bandit", "q_learning")
# As published: the reward of the batch that was formed, and a choice for each decision.
AT_ONCE = PolicySettings(horizon_batches=1)
states = st.builds(
    BatchState, batch=st.integers(0, 2000), loss_chunks=st.integers(0, 3000), peers=st.integers(0, 100_000)
)
rewards = st.floats(0, 1e6)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[list[Decision], float, BatchState | None]]:
    decisions = st.builds(Decision, states, st.sampled_from(Action))
    return draw(
        st.lists(st.tuples(st.lists(decisions, max_size=4), rewards, st.one_of(st.none(), states)), max_size=12)
    )


def made(name: str, seed: int = 0, settings: PolicySettings | None = None) -> StopPolicy:
    return POLICIES[name](settings or PolicySettings(), Random(seed))


def state(batch: int = 16, loss: int = 9, peers: int = 0) -> BatchState:
    return BatchState(batch, loss, peers)


# What every policy promises.


@pytest.mark.parametrize("name", POLICIES)
@examples(100, few=5)
@given(history=histories(), asked=st.lists(states, max_size=10))
def test_no_state_or_history_makes_a_policy_fail_and_free_admissions_are_always_taken(
    name: str, history: Sequence[tuple[list[Decision], float, BatchState | None]], asked: Sequence[BatchState]
) -> None:
    policy = made(name, settings=PolicySettings(horizon_batches=2))
    assert policy.name == name
    for decisions, tokens_per_s, next_state in history:
        policy.learn(decisions, tokens_per_s, next_state)
    for each in [*asked, *(one.state for decisions, _, _ in history for one in decisions)]:
        action = policy.decide(each)
        assert action is ADD or (each.loss_chunks > 0 and each.batch > 0)


@pytest.mark.parametrize("name", ["fcfs", "greedy"])
def test_fcfs_and_greedy_add_whatever_it_costs(name: str) -> None:
    assert made(name).decide(state(batch=500, loss=1000, peers=0)) is ADD


@pytest.mark.parametrize(
    ("batch", "loss", "peers", "action"),
    [
        (100, 0, 0, ADD),  # free
        (3, 50, 0, ADD),  # a small batch takes any loss
        (4, 50, 0, STOP),
        (4, 1, 0, ADD),  # within the threshold
        (4, 2, 0, STOP),
        (4, 2, 7, STOP),
        (4, 2, 8, ADD),  # many share what is left
        (4, 3, 1000, STOP),
    ],
)
def test_heuristic_follows_the_published_rules(batch: int, loss: int, peers: int, action: Action) -> None:
    assert made("heuristic").decide(state(batch, loss, peers)) is action


# The rules of the two that learn, by hand.


@pytest.mark.parametrize("name", LEARNED)
def test_what_was_never_tried_in_a_state_is_tried_first_add_before_stop(name: str) -> None:
    policy = made(name, settings=replace(AT_ONCE, epsilon=0.0, epsilon_min=0.0))
    assert policy.decide(state()) is ADD
    policy.learn([Decision(state(), ADD)], 1000.0, None)
    assert policy.decide(state()) is STOP
    policy.learn([Decision(state(), STOP)], 10.0, None)
    assert policy.decide(state()) is ADD


@pytest.mark.parametrize(("share_of_limit", "action"), [(0.99, ADD), (1.01, STOP)])
def test_bandit_compares_upper_confidence_bounds_of_scaled_and_fading_means(
    share_of_limit: float, action: Action
) -> None:
    """Rewards 1000 twice for ADD, 900 once for STOP between them; each batch leaves nine tenths of what was there."""
    add, stop = 0.9 * 0.9 + 1, 0.9
    surprise = log(add + stop)
    limit = (1000 - 900) / 1000 / (sqrt(surprise / stop) - sqrt(surprise / add))
    policy = Bandit(replace(AT_ONCE, exploration=share_of_limit * limit, memory_batches=10))
    for taken, tokens_per_s in [(ADD, 1000.0), (STOP, 900.0), (ADD, 1000.0)]:
        policy.learn([Decision(state(), taken)], tokens_per_s, None)
    assert policy.decide(state()) is action


def test_bandit_weighs_an_older_reward_less() -> None:
    policy = Bandit(replace(AT_ONCE, memory_batches=10))
    for tokens_per_s in (100.0, 200.0):
        policy.learn([Decision(state(), ADD)], tokens_per_s, None)
    [row] = policy.table()
    assert row.add_value == pytest.approx((0.9 * 100 + 200) / (0.9 + 1))


def test_bandit_counts_equal_decisions_of_one_batch_once_since_they_share_its_reward() -> None:
    policy = Bandit(AT_ONCE)
    policy.learn([Decision(state(), ADD)] * 7 + [Decision(state(), STOP)], 700.0, None)
    [row] = policy.table()
    assert (row.adds, row.stops, row.add_value, row.stop_value) == (1, 1, 700.0, 700.0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e5])
def test_bandit_decides_the_same_whatever_the_unit_of_its_rewards(scale: float) -> None:
    def decisions(unit: float) -> list[Action]:
        policy, rng = Bandit(replace(AT_ONCE, memory_batches=50)), Random(5)
        taken = []
        for _ in range(300):
            taken.append(policy.decide(state()))
            policy.learn([Decision(state(), taken[-1])], unit * rng.uniform(800, 1000), None)
        return taken

    assert decisions(scale) == decisions(7.0)


def test_bandit_tries_the_worse_action_again_but_rarely() -> None:
    """Steadily 1500 against 1000: the share of tries that is left is what exploring costs."""
    policy = Bandit(replace(AT_ONCE, memory_batches=2000))
    taken = Counter[Action]()
    for _ in range(8_000):
        action = policy.decide(state())
        taken[action] += 1
        policy.learn([Decision(state(), action)], 1000.0 if action is ADD else 1500.0, state())
    assert 5 <= taken[ADD] <= 20


def test_q_learning_gives_the_reward_to_the_last_decision_and_its_value_to_those_before() -> None:
    policy = QLearning(PolicySettings(alpha=0.1, gamma=0.5), Random(0))
    first, second, third = state(batch=4), state(batch=8), state(batch=16)
    policy.learn([Decision(first, ADD), Decision(second, STOP)], 1000.0, None)
    policy.learn([Decision(second, STOP)], 500.0, first)
    policy.learn([Decision(third, ADD), Decision(second, ADD)], 600.0, state(batch=300))
    by_batch = {row.batch: row for row in policy.table()}
    # The second value of an action has the weight 1 beside 1 - alpha.
    stop_in_second = (0.9 * 1000 + (0.5 * 500 + 0.5 * 1000)) / 1.9
    assert by_batch["3-4"].add_value == 1000
    assert by_batch["5-8"].stop_value == pytest.approx(stop_in_second)
    assert by_batch["5-8"].add_value == 600  # nothing is known of what came next
    assert by_batch["9-16"].add_value == pytest.approx(stop_in_second)  # the better of the two, not what was done


def test_q_learning_weighs_the_newest_value_by_alpha_in_the_long_run() -> None:
    policy = QLearning(PolicySettings(alpha=0.1), Random(0))
    for tokens_per_s in [1000.0] * 200 + [2000.0]:
        policy.learn([Decision(state(), STOP)], tokens_per_s, None)
    [row] = policy.table()
    assert row.stop_value == pytest.approx(1100)


def test_q_learning_values_a_long_row_of_admissions_no_higher_than_its_batch() -> None:
    policy = QLearning(PolicySettings(), Random(0))
    row_of_adds = [Decision(state(batch=batch, loss=1), ADD) for batch in range(1, 200)]
    for _ in range(50):
        policy.learn(row_of_adds, 1000.0, row_of_adds[0].state)
    assert {round(row.add_value or 0, 6) for row in policy.table()} == {1000.0}


def test_q_learning_looks_ahead_to_what_an_admission_leaves_behind() -> None:
    """ADD earns more now and leads to where every step earns less; only the discounted future tells."""
    policies: list[StopPolicy] = [QLearning(AT_ONCE, Random(0)), Bandit(AT_ONCE)]
    good, bad = state(batch=8), state(batch=32)
    for policy in policies:
        for _ in range(300):
            policy.learn([Decision(good, ADD)], 1500.0, bad)
            policy.learn([Decision(bad, STOP)], 500.0, bad)
            policy.learn([Decision(bad, ADD)], 500.0, bad)
            policy.learn([Decision(good, STOP)], 1000.0, good)
    q_row, bandit_row = (next(row for row in policy.table() if row.batch == "5-8") for policy in policies)
    assert (q_row.stop_value or 0) > (q_row.add_value or 0) * 1.3
    assert (bandit_row.stop_value or 0) < (bandit_row.add_value or 0)


def test_q_learning_explores_less_and_less_and_only_where_there_is_a_question() -> None:
    settings = replace(AT_ONCE, epsilon_decay=0.98, epsilon_min=0.002)
    policy = QLearning(settings, Random(0))
    for action, tokens_per_s in [(ADD, 1.0), (STOP, 1000.0)]:
        policy.learn([Decision(state(), action)], tokens_per_s, None)
    for _ in range(1000):
        policy.decide(state(loss=0))
    assert policy.dump()["epsilon"] == settings.epsilon
    actions = []
    for _ in range(10_000):
        actions.append(policy.decide(state()))
        policy.learn([], 1000.0, None)
    adds = [actions[start : start + 500].count(ADD) for start in range(0, 10_000, 500)]
    assert 5 <= adds[0] <= 50
    assert sum(adds[1:]) <= 30
    assert policy.dump()["epsilon"] == settings.epsilon_min


@pytest.mark.parametrize("name", LEARNED)
def test_a_choice_is_kept_in_its_state_for_the_horizon(name: str) -> None:
    policy = made(name, settings=PolicySettings(horizon_batches=5, epsilon_min=1.0))
    actions = []
    for _ in range(400):
        actions.append(policy.decide(state()))
        policy.learn([Decision(state(), actions[-1])], 1000.0, None)
    runs = [len(list(run)) for _, run in groupby(actions)]
    assert len(runs) > 3
    assert all(run % 5 == 0 for run in runs)


def test_bandit_rewards_a_decision_with_the_throughput_of_the_batches_from_then_on() -> None:
    policy = Bandit(PolicySettings(horizon_batches=3))
    policy.learn([Decision(state(), STOP)], 100.0, None)
    policy.learn([], 200.0, None)
    assert policy.table() == []
    policy.learn([Decision(state(), ADD)], 600.0, None)
    [row] = policy.table()
    assert (row.adds, row.stops, row.stop_value) == (0, 1, 300.0)


def test_to_the_bandit_batches_whose_ends_were_noticed_together_have_the_throughput_of_all_of_them() -> None:
    """Of four batches of 10 tokens, 20 ms each, the second one's end was noticed with the third one's."""
    policy = Bandit(PolicySettings(horizon_batches=4))
    for seconds in (0.020, 0.039, 0.001, 0.020):
        policy.learn([Decision(state(), STOP)], 10 / seconds, None, seconds)
    [row] = policy.table()
    assert row.stop_value == pytest.approx(500.0)


# Tables.


@pytest.mark.parametrize("name", LEARNED)
@examples(100, few=5)
@given(history=histories(), asked=st.lists(states, max_size=10))
def test_a_table_comes_back_from_json_as_it_was_and_decides_alike(
    name: str, history: Sequence[tuple[list[Decision], float, BatchState | None]], asked: Sequence[BatchState]
) -> None:
    policy, again = made(name, settings=AT_ONCE), made(name, settings=AT_ONCE)
    for decisions, tokens_per_s, next_state in history:
        policy.learn(decisions, tokens_per_s, next_state)
    again.load(json.loads(json.dumps(policy.dump(), allow_nan=False)))
    assert again.table() == policy.table()
    assert again.dump() == policy.dump()
    assert [again.decide(each) for each in asked] == [policy.decide(each) for each in asked]


@pytest.mark.parametrize("name", LEARNED)
def test_a_table_never_has_more_than_864_states(name: str) -> None:
    policy = made(name, settings=AT_ONCE)
    counts = [0, 1, 2, *(2**power + more for power in range(1, 14) for more in (0, 1))]
    for batch in counts:
        for loss in range(12):
            policy.learn([Decision(BatchState(batch, loss, peers), ADD) for peers in counts], 1.0, None)
    rows = policy.table()
    assert len(rows) == len({(row.batch, row.loss, row.peers) for row in rows}) == 864
    assert list(dict.fromkeys(row.batch for row in rows))[:6] == ["0", "1", "2", "3-4", "5-8", "9-16"]
    assert rows[-1].batch == rows[-1].peers == "513+"
    assert rows[-1].loss == "5+"


@pytest.mark.parametrize(
    ("low", "high", "same"),
    [(2, 3, False), (3, 4, True), (4, 5, False), (5, 8, True), (256, 257, False), (257, 512, True), (513, 10**6, True)],
)
def test_batches_share_a_bin_up_to_each_power_of_two(low: int, high: int, same: bool) -> None:
    policy = made("bandit", settings=AT_ONCE)
    policy.learn([Decision(state(batch=low), ADD)], 1.0, None)
    policy.learn([Decision(state(batch=high), ADD)], 1.0, None)
    assert (len(policy.table()) == 1) is same


@pytest.mark.parametrize("name", ["fcfs", "greedy", "heuristic"])
def test_a_policy_that_learns_nothing_has_nothing_to_show_or_load(name: str) -> None:
    policy = made(name)
    policy.learn([Decision(state(), ADD)], 1000.0, state())
    policy.load(policy.dump())
    assert (policy.dump(), list(policy.table())) == (None, [])
    with pytest.raises(ValueError, match="nothing to load"):
        policy.load({"values": []})


GOOD_ROW = ["9-16", "5+", "0", "add", 3, 2.5, 1000.0]


def row(index: int, value: Any) -> list[Any]:
    return [*GOOD_ROW[:index], value, *GOOD_ROW[index + 1 :]]


@pytest.mark.parametrize(
    "values",
    [
        None,
        {},
        "add",
        [None],
        [GOOD_ROW[:-1]],
        [[*GOOD_ROW, 1]],
        [GOOD_ROW, GOOD_ROW],
        [row(0, "9-17")],
        [row(0, 9)],
        [row(1, "6")],
        [row(2, "-1")],
        [row(3, "wait")],
        [row(4, 0)],
        [row(4, True)],
        [row(4, 2.0)],
        [row(4, 2**70)],
        [row(5, 0.0)],
        [row(5, float("nan"))],
        [row(5, "2")],
        [row(6, float("inf"))],
        [row(6, -1.0)],
        [row(6, None)],
        [row(6, 10**400)],
    ],
)
@pytest.mark.parametrize("name", LEARNED)
def test_a_table_that_no_policy_can_have_dumped_is_refused_and_changes_nothing(name: str, values: Any) -> None:
    policy = made(name, settings=AT_ONCE)
    policy.learn([Decision(state(), STOP)], 1000.0, state())
    before = policy.dump()
    with pytest.raises(ValueError, match=r"learned value"):
        policy.load({**before, "values": values})
    assert policy.dump() == before
    policy.load({**before, "values": [GOOD_ROW]})
    assert policy.dump() != before


@pytest.mark.parametrize(
    ("name", "dumped"),
    [
        ("bandit", None),
        ("bandit", []),
        ("bandit", {}),
        ("bandit", {"values": [], "epsilon": 0.5}),
        ("q_learning", {"values": []}),
        ("q_learning", {"values": [], "epsilon": 1.5}),
        ("q_learning", {"values": [], "epsilon": "0.5"}),
        ("q_learning", {"values": [GOOD_ROW[:-1]], "epsilon": 0.25}),
    ],
)
def test_a_dump_of_another_shape_is_refused_and_changes_nothing(name: str, dumped: Any) -> None:
    policy = made(name)
    before = policy.dump()
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        policy.load(dumped)
    assert policy.dump() == before


def test_q_learning_goes_on_exploring_where_it_was() -> None:
    policy, again = made("q_learning", settings=AT_ONCE), made("q_learning")
    policy.learn([Decision(state(), ADD), Decision(state(), STOP)], 1000.0, None)
    for _ in range(40):
        policy.decide(state())
        policy.learn([], 1000.0, None)
    again.load(policy.dump())
    assert again.dump()["epsilon"] == pytest.approx(0.95**40)
