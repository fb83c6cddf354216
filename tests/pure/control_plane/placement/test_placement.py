"""Which worker a request goes to: terms, policies, ties; and whether it is disaggregated at all."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import InvalidInputError
from cluster_core.ids import WorkerId
from control_plane.fleet.candidates import candidates, fixed_columns
from control_plane.fleet.loads import Load
from control_plane.model.worker_snapshot import Pool, WorkerSnapshot
from control_plane.placement import disaggregation
from control_plane.placement import terms as placement_terms
from control_plane.placement.disaggregation import Prices, Reason
from control_plane.placement.long_prompts import LongPrompts
from control_plane.placement.policy import Decision, PlacementPolicy, Question
from control_plane.placement.running_prefixes import MARKS, RunningPrefixes, Shared
from control_plane.placement.terms import POLICIES, make_policy
from control_plane.placement.view import PoolView, unknown_prompt
from kv_transfer.claims.prefix_chunks import chunk_keys

GENERATION = 2
PREFILL, DECODE = wire.POOL_PREFILL, wire.POOL_DECODE
POOLS = (PREFILL, DECODE)
QUESTION = Question(100, 10)


def test_a_long_prompt_costs_more_than_its_tokens() -> None:
    """1000 tokens after 9000 that are cached attend to 9.5 million pairs, 1000 alone to half a million."""
    among = pool({"a": {}}, prefill_s=0.5, prefill_s_per_token=1e-3, prefill_s_per_pair=1e-6)
    cached = having(among, device=[9000])
    assert placement_terms.prefill_s(Question(10_000, 1), cached)[0] == pytest.approx(0.5 + 1.0 + 9.5)
    assert placement_terms.prefill_s(Question(1000, 1), among)[0] == pytest.approx(0.5 + 1.0 + 0.5)


def test_what_nobody_has_measured_yet_is_taken_from_who_has() -> None:
    workers = [WorkerSnapshot(WorkerId(name), GENERATION, PREFILL, "") for name in "ab"]
    records = [wire.WorkerRegistration(costs=wire.WorkerCosts(prefill_s_per_token=cost)) for cost in (0.0, 2.0)]
    elsewhere = [wire.WorkerRegistration(costs=wire.WorkerCosts(prefill_s_per_token=8.0, pull_s=3.0))]
    fixed = fixed_columns(workers, records, [*records, *elsewhere])
    assert fixed.prefill_s_per_token.tolist() == [2.0, 2.0]
    assert fixed.pull_s.tolist() == [3.0, 3.0]
    assert (fixed.load_s_per_token > 0).all()


def test_a_cost_that_was_measured_as_nothing_is_nothing() -> None:
    """Time for each prefill alone explains what the worker saw."""
    workers = [WorkerSnapshot(WorkerId(name), GENERATION, PREFILL, "") for name in "ab"]
    records = [
        wire.WorkerRegistration(costs=wire.WorkerCosts(prefill_s=0.02)),
        wire.WorkerRegistration(costs=wire.WorkerCosts(prefill_s_per_token=1e-3)),
    ]
    fixed = fixed_columns(workers, records, records)
    assert fixed.prefill_s.tolist() == [0.02, 0] and fixed.prefill_s_per_token.tolist() == [0, 1e-3]


def pool(loads: Mapping[str, Mapping[Load, float]], *, now_s: float = 0.0, **costs: float) -> PoolView:
    """Workers by name with what the router has on each; room for 10,000 tokens. None has anything of the prompt."""
    workers = [WorkerSnapshot(WorkerId(name), GENERATION, PREFILL, "") for name in loads]
    record = wire.WorkerRegistration(
        block_size_tokens=10,
        max_running_requests=64,
        load=wire.WorkerLoad(free_blocks=1000, total_blocks=1000),
        costs=wire.WorkerCosts(**costs),
    )
    columns = np.zeros((len(Load), len(loads)))
    for row, load in enumerate(loads.values()):
        for column, value in load.items():
            columns[column, row] = value
    return unknown_prompt(PREFILL, candidates(fixed_columns(workers, [record] * len(loads), []), columns, now_s))


def chosen(policy: PlacementPolicy, among: PoolView, question: Question = QUESTION, seed: int = 0) -> str | None:
    worker = policy.choose(question, among, random.Random(seed)).worker
    return worker.worker_id if worker else None


def having(among: PoolView, **columns: Any) -> PoolView:
    """What each has of the prompt."""
    given: dict[str, Any] = {name: np.array(value, dtype=float) for name, value in columns.items()}
    return replace(among, **given)


# Policies.


def test_the_least_loaded_has_fewest_tokens_in_flight_and_requests_count_as_some() -> None:
    policy = make_policy("least_loaded", DECODE)
    few, many = {Load.REQUESTS: 1, Load.TOKENS: 20}, {Load.REQUESTS: 1, Load.TOKENS: 500}
    assert chosen(policy, pool({"a": many, "b": few})) == "b"
    assert (
        chosen(policy, pool({"a": {Load.REQUESTS: 10, Load.TOKENS: 10}, "b": {Load.REQUESTS: 1, Load.TOKENS: 100}}))
        == "b"
    )


def test_round_robin_takes_who_waited_longest_for_a_turn() -> None:
    policy = make_policy("round_robin", PREFILL)
    assert chosen(policy, pool({"a": {Load.TURN: 7}, "b": {Load.TURN: 5}, "c": {Load.TURN: 6}})) == "b"


def test_prefix_only_follows_the_cache_into_overload() -> None:
    among = having(pool({"a": {Load.ARRIVING_UNTIL_S: 9}, "b": {}}), device=[30, 0], host=[20, 40])
    assert chosen(make_policy("prefix_only", PREFILL), among) == "a"


def test_the_published_formula_by_hand() -> None:
    """max(active + prompt - device - 0.75 host, 0): a: 500 + 1000 - 800 = 700; b: 1000 - 0.75 * 200 = 850; c: 1000."""
    among = having(pool({"a": {Load.UNCOMPUTED: 500}, "b": {}, "c": {}}), device=[800, 0, 0], host=[0, 200, 0])
    decision = make_policy("cost_formula", PREFILL).choose(Question(1000, 1), among, random.Random(0))
    assert decision.worker is not None and decision.worker.worker_id == "a"
    assert decision.terms["cost"].tolist() == pytest.approx([1, 701 / 851, 701 / 1001])


def test_hotness_goes_where_the_first_token_is_expected_first() -> None:
    """a holds half of it and is busy for 40 ms; what b lacks takes 50 ms, then 10 ms, and counts three times."""
    policy = make_policy("hotness", PREFILL)

    def winner(s_per_token: float, now_s: float = 0.0) -> str | None:
        among = pool({"a": {Load.ARRIVING_UNTIL_S: 0.04}, "b": {}}, now_s=now_s, prefill_s_per_token=s_per_token)
        return chosen(policy, having(among, device=[500, 0]), Question(1000, 1))

    assert winner(1e-4) == "a"
    assert winner(0.2e-4) == "b"
    assert winner(0.2e-4, now_s=0.02) == "a"


def test_long_prompts_keep_to_one_half_at_a_price() -> None:
    """1000 tokens take 100 ms; what is above 50 ms is long and pays 75 ms in the second half, b's."""
    policy = make_policy("hotness", PREFILL)

    def winner(tokens: int, queue_s: float, long_s: float) -> str | None:
        among = pool({"a": {Load.ARRIVING_UNTIL_S: queue_s}, "b": {}}, prefill_s_per_token=1e-4)
        return chosen(policy, replace(among, long_s=long_s), Question(tokens, 1))

    assert winner(1000, 0.07, 0.05) == "a"
    assert winner(1000, 0.08, 0.05) == "b", "nothing is forbidden"
    assert winner(400, 0.01, 0.05) == "b", "short ones go where it is quick"
    assert winner(1000, 0.01, math.inf) == "b"
    alone = pool({"a": {}}, prefill_s_per_token=1e-4)
    assert (
        make_policy("hotness", PREFILL)
        .choose(Question(1000, 1), replace(alone, long_s=0.01), random.Random(0))
        .scores[0]
        == 1
    )


def test_what_is_long_is_told_by_the_work_it_brings() -> None:
    prompts = LongPrompts()
    for number in range(63):
        prompts.add(9.0 if number % 10 == 0 else 1.0)
    assert prompts.long_s == math.inf
    prompts.add(1.0)
    assert prompts.long_s == 9.0, "7 of 64 bring more than two fifths"
    for _ in range(1024):
        prompts.add(2.0)
    assert prompts.long_s == 2.0


def test_hotness_weighs_loading_from_host_memory_at_its_price() -> None:
    policy = make_policy("hotness", PREFILL)
    for load_s_per_token, winner in ((1e-5, "b"), (9e-5, "a")):
        among = pool({"a": {}, "b": {}}, prefill_s_per_token=1e-4, load_s_per_token=load_s_per_token)
        assert chosen(policy, having(among, device=[400, 0], host=[0, 900]), Question(1000, 1)) == winner


def test_decodes_go_where_their_prefix_is_decoded() -> None:
    policy = make_policy("hotness", DECODE)
    same, full = {Load.REQUESTS: 6, Load.TOKENS: 6000}, {Load.REQUESTS: 64, Load.TOKENS: 9500}

    def winner(**loads: Mapping[Load, float]) -> str | None:
        return chosen(policy, having(pool(loads), shared=[0, 900, 900], sharers=[0, 1, 6]), Question(1000, 10))

    assert winner(a=same, b=same, c=same) == "c"
    assert winner(a={}, b=same, c=full) == "b", "a full worker helps nobody"


def test_decodes_avoid_a_worker_whose_memory_is_used_up() -> None:
    policy = make_policy("hotness", DECODE)
    assert (
        chosen(policy, pool({"a": {Load.REQUESTS: 1, Load.TOKENS: 9_950}, "b": {Load.REQUESTS: 2, Load.TOKENS: 50}}))
        == "b"
    )


def test_weights_can_be_given_and_a_weight_of_nothing_leaves_a_term_out() -> None:
    policy = make_policy("hotness", DECODE, {"affinity": 0, "pull": 7})
    assert policy.weights == {"pull": 7, "room": 2, "memory": 1, "adapter": 1}
    with pytest.raises(InvalidInputError, match="policy `hotness` has no term `colour`; it has: affinity, pull"):
        make_policy("hotness", DECODE, {"colour": 1})


# Filters and ties.


def test_an_excluded_worker_is_not_chosen_even_when_idle_but_its_next_start_is() -> None:
    among = pool({"a": {}, "b": {Load.REQUESTS: 9, Load.TOKENS: 9000}})
    policy = make_policy("least_loaded", DECODE)
    assert chosen(policy, among, Question(1, 1, frozenset({("a", GENERATION)}))) == "b"
    assert chosen(policy, among, Question(1, 1, frozenset({("a", GENERATION - 1)}))) == "a"


@pytest.mark.parametrize("name", POLICIES)
def test_a_doubtful_worker_is_chosen_where_there_is_no_other(name: str) -> None:
    among, policy = pool({"a": {}, "b": {Load.REQUESTS: 9, Load.TOKENS: 900}, "c": {}}), make_policy(name, DECODE)
    doubtful = Question(100, 10, avoided=frozenset({("a", GENERATION), ("c", GENERATION - 1)}))
    assert {chosen(policy, among, doubtful, seed) for seed in range(20)} <= {"b", "c"}
    failed = frozenset({("b", GENERATION), ("c", GENERATION)})
    assert chosen(policy, among, replace(doubtful, excluded=failed)) == "a"
    # Of a request that harms others, too.
    assert chosen(policy, among, replace(doubtful, excluded=frozenset({("c", GENERATION)}), alone=True)) == "b"


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_is_chosen_when_all_are_excluded_or_there_are_none(name: str) -> None:
    for each in POOLS:
        policy = make_policy(name, each)
        assert chosen(policy, pool({})) is None
        assert chosen(policy, pool({"a": {}}), Question(1, 1, frozenset({("a", GENERATION)}))) is None


def test_a_tie_is_broken_by_the_seed() -> None:
    among = pool({"a": {}, "b": {}, "c": {}})
    for name in POLICIES:
        policy = make_policy(name, PREFILL)
        assert {chosen(policy, among, seed=seed) for seed in range(30)} == {"a", "b", "c"}
        assert chosen(policy, among, seed=5) == chosen(policy, among, seed=5)


def test_weights_decide_between_terms() -> None:
    among = pool({"a": {}, "b": {Load.REQUESTS: 1}})

    def likes_b(_question: Question, _view: PoolView) -> Any:
        return np.array([0.0, 1.0])

    for weight, winner in ((10.0, "a"), (0.1, "b")):
        policy = PlacementPolicy((("load", placement_terms.load, weight), ("b", likes_b, 1.0)))
        assert chosen(policy, among) == winner


columns = st.lists(
    st.fixed_dictionaries(
        {
            Load.REQUESTS: st.integers(0, 100),
            Load.TOKENS: st.integers(0, 100_000),
            Load.UNCOMPUTED: st.integers(0, 100_000),
            Load.ARRIVING_UNTIL_S: st.floats(0, 1000),
            Load.TURN: st.integers(0, 10_000),
        }
    ),
    min_size=1,
    max_size=8,
)


@given(columns, st.data(), st.integers(1, 50_000), st.integers(1, 1000))
def test_every_term_lies_between_zero_and_one(
    loads: list[dict[Load, float]], data: st.DataObject, prompt: int, most: int
) -> None:
    part = st.lists(st.integers(0, prompt), min_size=len(loads), max_size=len(loads))
    among = having(
        pool({f"w{row}": load for row, load in enumerate(loads)}),
        **{name: data.draw(part) for name in ("device", "host", "shared", "sharers")},
    )
    for name in POLICIES:
        for each in POOLS:
            decision = make_policy(name, each).choose(Question(prompt, most), among, random.Random(0))
            assert decision.worker is not None
            for term in decision.terms.values():
                assert np.isfinite(term).all() and (term >= 0).all() and (term <= 1 + 1e-12).all()


# Prefixes that run somewhere.


def test_running_prefixes_are_found_to_the_depth_below_what_is_shared() -> None:
    running = RunningPrefixes()
    root = 7
    prompt = list(range(128 * 40))
    first, second = chunk_keys(prompt, root, 128), chunk_keys([*prompt[: 128 * 20], *prompt[: 128 * 20]], root, 128)
    running.add("a", first)
    running.add("a", first)
    running.add("b", second)
    assert running.shared(first) == {"a": Shared(32, 2), "b": Shared(16, 1)}
    assert running.shared(chunk_keys(prompt[5:], root, 128)) == {}
    running.remove("a", first)
    assert running.shared(first)["a"] == Shared(32, 1)
    running.remove("a", first)
    running.remove("b", second)
    assert len(running) == 0, "nothing is left behind"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.integers(0, 40)), max_size=12), st.data())
def test_what_requests_have_in_common_is_counted_once_for_each_but_the_first(
    requests: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """Prompts branch off one another at marked depths, so that what is shared is found exactly."""
    prompts = [
        (
            worker,
            np.array([*range(1, 16 + 1)][:common] + [1000 * number + each for each in range(own)], dtype=np.uint64),
        )
        for number, (worker, common, own) in enumerate(requests, 1)
    ]
    running = RunningPrefixes()
    for worker, keys in prompts:
        running.add(worker, keys)
    gone = data.draw(st.lists(st.sampled_from(range(len(prompts))), unique=True)) if prompts else []
    for number in gone:
        running.remove(*prompts[number])
    left = [each for number, each in enumerate(prompts) if number not in gone]
    for worker in "ab":
        its = [keys for name, keys in left if name == worker]
        marked = [{int(keys[depth - 1]): depth for depth in MARKS if depth <= len(keys)} for keys in its]
        counted = sum(max(each.values(), default=0) for each in marked)
        distinct = {key: depth for each in marked for key, depth in each.items()}
        below = {key: max((mark for mark in MARKS if mark < depth), default=0) for key, depth in distinct.items()}
        once = sum(depth - below[key] for key, depth in distinct.items())
        assert running.repeated.get(worker, 0) == counted - once
    for number, each in enumerate(prompts):
        if number not in gone:
            running.remove(*each)
    assert not running.repeated and not len(running)


def test_memory_that_requests_share_is_free_for_others() -> None:
    """Ten of 1,000 tokens, 900 of them in common, on a worker with room for 10,000."""
    among = pool({"a": {Load.REQUESTS: 10, Load.TOKENS: 10_000}})
    alone, together = (
        make_policy("hotness", DECODE).choose(THOUSAND, having(among, repeated=[shared]), random.Random(0)).terms
        for shared in (0, 9 * 900)
    )
    assert together["memory"][0] > alone["memory"][0]


# Disaggregation.


def decided(each: Pool, among: PoolView) -> Decision:
    return make_policy("hotness", each).choose(THOUSAND, among, random.Random(0))


def priced(prefill: PoolView, decode: PoolView) -> Prices:
    return disaggregation.prices(decided(PREFILL, prefill), decided(DECODE, decode), THOUSAND)


THOUSAND = Question(1000, 10)
COSTS = {"prefill_s_per_token": 1e-4, "decode_step_s": 0.01, "pull_s": 0.02, "pull_s_per_token": 1e-6}


def test_the_two_ways_are_priced_by_what_was_measured() -> None:
    price = priced(pool({"p": {}}, **COSTS), having(pool({"d": {Load.REQUESTS: 3}}, **COSTS), device=[900]))
    assert price.remainder_tokens == 100
    assert price.local_s == pytest.approx(100e-4 * (1 + 3))
    assert price.remote_s == pytest.approx(0.1 + 1e-3 + 0.02 + 100e-6)


def test_a_busy_batch_is_not_made_to_wait_for_one_prompt() -> None:
    prefill = pool({"p": {}}, **COSTS)
    alone, crowd = (
        priced(prefill, having(pool({"d": {Load.REQUESTS: others}}, **COSTS), device=[900])) for others in (0, 40)
    )
    assert disaggregation.reason_for(alone, 512) is Reason.SHORT_REMAINDER
    assert disaggregation.reason_for(crowd, 512) is Reason.REMOTE_SOONER


@pytest.mark.parametrize(
    ("local_s", "remote_s", "remainder", "reason"),
    [
        (0.01, 0.02, 100, Reason.SHORT_REMAINDER),
        (0.02, 0.01, 100, Reason.REMOTE_SOONER),
        (0.01, 0.015, 5000, Reason.LONG_REMAINDER),
        (0.01, 0.03, 5000, Reason.PREFILL_SLOW),
        (0.01, 0.02, 512, Reason.SHORT_REMAINDER),
        (0.01, 0.02, 513, Reason.LONG_REMAINDER),
    ],
)
def test_reasons(local_s: float, remote_s: float, remainder: int, reason: Reason) -> None:
    assert disaggregation.reason_for(Prices(local_s, remote_s, remainder), 512) is reason
