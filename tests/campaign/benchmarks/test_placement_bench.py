"""`rachis bench placement`: a queue and caches by hand, the router's view of them, what is printed and refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import placement
from benchmarks.placement import (
    LOAD_TOLERANCE,
    at_speed,
    prompts_of,
    simulate,
    speed_for,
    speedups,
)  # fmt: skip
from benchmarks.placement_costs import PrefillCosts, default_costs, fitted, read_costs
from benchmarks.placement_world import Caches, Cluster, PlacementWorld, Prompt, SimulatedRouter
from cluster_configs.preemption_costs import default_model
from cluster_core.errors import ConfigError, InvalidInputError
from cluster_sim.workloads.few_shot import SHAPES, generated
from cluster_sim.workloads.traces import Trace, TraceRequest
from command_line.bench.placement_run import policy_names
from control_plane.fleet.loads import Load
from control_plane.placement.terms import POLICIES
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.tiers.settings import TierSettings
from kv_transfer.tiers.tier_terms import Admission, TierRules
from tests.command import rachis

BLOCK = 10
# A second for each token computed, a tenth for one loaded.
PLAIN = PrefillCosts(fixed_s=0.0, s_per_token=1.0, s_per_pair=0.0, load_s_per_token=0.1)
LRU = TierSettings(eviction="lru", rules=TierRules(Admission.EVERYTHING, promotion=False))


def prompt(number: int, arrival_s: float, tokens: int, blocks: Sequence[int]) -> Prompt:
    return Prompt(number, arrival_s, tokens, 1, np.array(blocks, dtype=np.uint64))


def cluster(workers: int = 1, device_blocks: int = 100, host_blocks: int = 0, **others: Any) -> Cluster:
    given: dict[str, Any] = {"costs": PLAIN, "event_delay_s": 0.0, "prediction_s": 0.0, **others}
    return Cluster(workers, Caches(BLOCK, device_blocks, host_blocks, LRU), **given)


def run(prompts: Sequence[Prompt], policy: str, among: Cluster) -> placement.Run:
    return simulate(prompts, policy, among, lambda steps: None)


# What prefill costs.


def test_cost_is_that_of_tokens_pairs_and_loads() -> None:
    costs = PrefillCosts(fixed_s=0.5, s_per_token=2.0, s_per_pair=0.1, load_s_per_token=0.25)
    # 10 of 100 on the device, 30 on the host: 60 computed, (100^2 - 40^2) / 2 = 4200 pairs.
    assert costs.prefill_s(100, 10, 30) == pytest.approx(0.5 + 2.0 * 60 + 0.1 * 4200 + 0.25 * 30)


def test_computing_in_two_parts_costs_the_same_but_for_the_fixed_part() -> None:
    costs = default_costs()
    whole, first, rest = costs.prefill_s(8192, 0, 0), costs.prefill_s(4096, 0, 0), costs.prefill_s(8192, 4096, 0)
    assert first + rest == pytest.approx(whole + costs.fixed_s)


def test_profile_is_fitted_without_negative_coefficients() -> None:
    profile = default_model("cuda")
    costs = fitted(profile)
    assert min(costs.table().values()) >= 0
    for tokens, ms in profile.recompute.points.items():
        assert costs.prefill_s(tokens, 0, 0) * 1000 == pytest.approx(ms, rel=0.15)


def test_costs_are_read_from_a_profile_or_from_figures(tmp_path: Path) -> None:
    profile, figures = tmp_path / "profile.json", tmp_path / "figures.json"
    default_model("cuda").save(profile)
    figures.write_text(json.dumps(PLAIN.table()))
    assert read_costs(profile) == default_costs()
    assert read_costs(figures) == PLAIN


@pytest.mark.parametrize("text", ["", "[]", "{", '{"fixed_s": 1}', json.dumps({**PLAIN.table(), "s_per_pair": -1})])
def test_costs_that_cannot_be_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(InvalidInputError):
        read_costs(file)
    with pytest.raises(InvalidInputError):
        read_costs(tmp_path / "none.json")


# One worker.


def test_prompts_are_prefilled_one_by_one_as_they_come() -> None:
    prompts = [prompt(0, 0.0, 5, []), prompt(1, 1.0, 3, []), prompt(2, 2.0, 1, []), prompt(3, 20.0, 4, [])]
    found = run(prompts, "round_robin", cluster())
    assert found.queue_s.tolist() == [0.0, 4.0, 6.0, 0.0]
    assert found.ttft_s.tolist() == [5.0, 7.0, 7.0, 4.0]
    assert found.busy_s.tolist() == [13.0]
    assert found.load == pytest.approx(13 / 20)


def test_prefix_is_computed_once_and_loaded_once_it_has_left_the_device() -> None:
    among = cluster(device_blocks=4, host_blocks=10)
    prompts = [prompt(0, 0.0, 21, [1, 2]), prompt(1, 50.0, 21, [1, 2]), prompt(2, 100.0, 30, [7, 8, 9]),
             prompt(3, 200.0, 21, [1, 2])]  # fmt: skip
    found = run(prompts, "round_robin", among)
    assert found.ttft_s.tolist() == pytest.approx([21.0, 1.0, 30.0, 1.0 + 20 * 0.1])
    assert (found.device_hit_tokens, found.host_hit_tokens) == (20, 20)


def test_last_token_is_computed_even_of_a_prompt_that_is_cached_whole() -> None:
    found = run([prompt(0, 0.0, 20, [1, 2]), prompt(1, 50.0, 20, [1, 2])], "round_robin", cluster())
    assert found.ttft_s.tolist() == [20.0, 10.0]


def test_a_worker_claims_what_has_come_and_what_has_left() -> None:
    world = PlacementWorld("round_robin", cluster(device_blocks=4, host_blocks=10), 5)
    claims = []
    # The index applies a claim after a delay: the test sees what a worker sends.
    world.router.claimed = lambda number, change: claims.append(change)  # type: ignore[method-assign]
    world.run([prompt(0, 0.0, 20, [1, 2]), prompt(1, 50.0, 30, [7, 8, 9])], lambda steps: None)
    world.engines[0].check_invariants()
    keys = [
        [sorted(each.tolist()) for each in (got.device_stored, got.device_removed, got.host_stored, got.host_removed)]
        for got in claims
    ]
    assert keys == [[[1, 2], [], [1, 2], []], [[], [1, 2], [], []], [[7, 8, 9], [], [7, 8, 9], []]]


def test_a_prompt_fits_with_the_token_that_it_is_answered_with() -> None:
    caches = cluster(device_blocks=3).caches
    assert caches.holds(29) and not caches.holds(30)
    assert run([prompt(0, 0.0, 29, [1, 2])], "hotness", cluster(device_blocks=3)).ttft_s.tolist() == [29.0]


# A pool.


def trace() -> Trace:
    return generated(SHAPES["mmlu"], requests=40, noise_share=0.2)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_request_is_prefilled_once_and_no_second_is_lost(policy: str) -> None:
    of = trace()
    prompts = at_speed(prompts_of(of), 50.0)
    among = Cluster(4, Caches(of.block_tokens, 200, 200, TierSettings()), default_costs())
    done: list[int] = []
    found = simulate(prompts, policy, among, done.append)
    assert sum(done) == len(prompts)
    assert set(found.placed_on.tolist()) <= set(range(4))
    assert (found.queue_s >= 0).all()
    assert found.ttft_s.sum() == pytest.approx(found.queue_s.sum() + found.busy_s.sum())
    assert found.prompt_tokens == sum(each.input_tokens for each in of)
    figures = found.figures()
    assert 0 <= figures["device_hit_ratio"] <= figures["hit_ratio"] < 1
    assert 1 <= figures["imbalance"] <= 4


def test_runs_repeat() -> None:
    of = trace()
    among = Cluster(3, Caches(of.block_tokens, 100, 100, TierSettings()), default_costs(), seed=7)
    once, again = (run(at_speed(prompts_of(of, 7), 40.0), "hotness", among) for _ in range(2))
    assert once.figures() == again.figures()
    assert (once.ttft_s == again.ttft_s).all()


def test_round_robin_takes_turns() -> None:
    found = run([prompt(each, float(each), 1, []) for each in range(7)], "round_robin", cluster(3))
    assert len({*found.placed_on[:3].tolist()}) == 3
    assert found.placed_on[3:].tolist() == found.placed_on[:4].tolist()


@pytest.mark.parametrize("policy", ["hotness", "prefix_only", "cost_formula"])
def test_planted_duplicate_goes_where_it_was(policy: str) -> None:
    prompts = [
        prompt(0, 0.0, 51, [1, 2, 3, 4, 5]),
        prompt(1, 60.0, 51, [11, 12, 13, 14, 15]),
        prompt(2, 120.0, 51, [1, 2, 3, 4, 5]),
    ]
    found = run(prompts, policy, cluster(4))
    assert found.placed_on[2] == found.placed_on[0]
    assert found.device_hit_tokens == 50
    assert found.ttft_s[2] == 1.0


def test_sibling_is_seen_by_prediction_before_the_worker_has_told() -> None:
    siblings = [prompt(0, 0.0, 51, [1, 2, 3, 4, 5]), prompt(1, 1.0, 51, [1, 2, 3, 4, 5])]
    late: dict[str, Any] = {"event_delay_s": 1000.0}
    foreseen = run(siblings, "prefix_only", cluster(8, **late, prediction_s=500.0))
    assert foreseen.placed_on[0] == foreseen.placed_on[1]
    # Of seven others one would be taken by chance: seeds tell.
    unforeseen = [run(siblings, "prefix_only", cluster(8, **late, seed=seed)) for seed in range(5)]
    assert any(each.placed_on[0] != each.placed_on[1] for each in unforeseen)


def test_index_hears_of_blocks_with_a_delay() -> None:
    prompts = [prompt(0, 0.0, 51, [1, 2, 3, 4, 5]), prompt(1, 60.0, 51, [1, 2, 3, 4, 5])]
    seeds = range(5)
    soon, late = (
        [run(prompts, "prefix_only", cluster(8, event_delay_s=delay_s, seed=seed)).placed_on for seed in seeds]
        for delay_s in (8.0, 10.0)
    )
    assert all(each[0] == each[1] for each in soon)
    assert any(each[0] != each[1] for each in late)


def test_router_counts_what_lies_on_the_device_and_what_follows_in_host_memory() -> None:
    router = SimulatedRouter("hotness", cluster(), 100, lambda: 0.0)
    device, host = np.array([1, 2], dtype=np.uint64), np.array([1, 2, 3], dtype=np.uint64)
    router.claimed(0, ClaimChange(device_stored=device, host_stored=host))
    _, flight = router.place(prompt(0, 0.0, 35, [1, 2, 3]))
    (member,) = router.membership.members()
    assert member.loads.value(member.row, Load.UNCOMPUTED) == 5
    assert member.loads.value(member.row, Load.PENDING_S) == pytest.approx(5 + 10 * 0.1, abs=0.01)
    flight.end()
    assert member.loads.value(member.row, Load.UNCOMPUTED) == 0


def test_published_formula_chooses_as_computed_by_hand() -> None:
    # 0 takes 40 tokens of new work; 1 goes to the other and takes 30. 2 has 20 of 30 tokens cached where 0 runs:
    # 40 + 30 - 20 = 50 there against 30 + 30 = 60; without prediction nothing is cached yet: 70 against 60.
    prompts = [prompt(0, 0.0, 40, [1, 2, 3, 4]), prompt(1, 0.5, 30, [7, 8, 9]), prompt(2, 1.0, 30, [1, 2, 5])]
    with_prediction = run(prompts, "cost_formula", cluster(2, prediction_s=100.0)).placed_on.tolist()
    assert with_prediction[1] != with_prediction[0] == with_prediction[2]
    without = run(prompts, "cost_formula", cluster(2)).placed_on.tolist()
    assert without[1] == without[2] != without[0]


def test_ours_knows_what_has_been_done_of_the_running_prefill() -> None:
    # Ten seconds of a long one are left when 2 comes, the other one has just begun with twenty: tokens in flight say
    # the opposite.
    prompts = [prompt(0, 0.0, 100, []), prompt(1, 90.0, 20, []), prompt(2, 90.1, 5, [])]
    ours = run(prompts, "hotness", cluster(2)).placed_on.tolist()
    assert ours[2] == ours[0] != ours[1]
    published = run(prompts, "cost_formula", cluster(2)).placed_on.tolist()
    assert published[2] == published[1] != published[0]


# Arrivals and load.


def test_requests_of_a_tick_are_spread_over_it_in_their_order() -> None:
    of = Trace("t", 512, tuple(TraceRequest(at, 1, 1, ()) for at in (0.0, 0.0, 0.0, 3.0, 6.0, 6.0)))
    arrivals_s = [each.arrival_s for each in prompts_of(of, seed=1)]
    assert arrivals_s[0] == 0.0
    assert arrivals_s == sorted(arrivals_s)
    assert len(set(arrivals_s)) == 6
    assert [each.arrival_s for each in prompts_of(of, seed=2)] != arrivals_s
    assert [each.arrival_s for each in at_speed(prompts_of(of, seed=1), 2.0)] == [at / 2 for at in arrivals_s]


def test_names_of_blocks_are_never_zero_and_never_the_same() -> None:
    of = Trace("t", 1, (TraceRequest(0.0, 1000, 1, tuple(range(1000))),))
    keys = prompts_of(of)[0].keys
    assert len(set(keys.tolist())) == 1000
    assert keys.all()


def test_speed_is_found_for_a_load() -> None:
    of = trace()
    among = Cluster(2, Caches(of.block_tokens, 100, 0, TierSettings()), default_costs())
    speed, found = speed_for(0.5, prompts_of(of), among, lambda steps: None)
    assert found.load == pytest.approx(0.5, abs=LOAD_TOLERANCE)
    assert found.load == run(at_speed(prompts_of(of), speed), "cost_formula", among).load


def test_speedups_are_of_ours() -> None:
    runs = {"hotness": {"ttft_p90_ms": 50.0}, "random": {"ttft_p90_ms": 75.0}}
    assert speedups(runs, "hotness", "ttft_p90_ms") == {"random": 1.5}
    assert speedups({"random": {"ttft_p90_ms": 75.0}}, "hotness", "ttft_p90_ms") == {}


# The command.


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": at * 100, "input_length": 1024, "output_length": 1, "hash_ids": [at % 3 * 2, at % 3 * 2 + 1]}
        for at in range(10)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def invoke(*arguments: str) -> Any:
    return rachis("bench", "placement", *arguments)


def test_command_prints_json_of_all_policies(small: Path) -> None:
    found = invoke("--trace", str(small), "--workers", "2", "--json")
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout.splitlines()[-1])
    assert set(result["policies"]) == set(POLICIES)
    wanted = {"ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "hit_ratio", "imbalance"}
    assert all(wanted <= set(figures) for figures in result["policies"].values())
    assert set(result["ttft_p90_speedup"]) == set(POLICIES) - {"hotness"}
    assert result["policies"]["cost_formula"]["load"] == pytest.approx(0.95, abs=0.2)
    assert invoke("--trace", str(small), "--workers", "2", "--json").stdout == found.stdout


def test_command_prints_a_table(small: Path) -> None:
    found = invoke("--trace", str(small), "--speed", "3", "--policy", "random,hotness")
    assert found.exit_code == 0, found.output
    assert "hotness" in found.stdout
    assert "cost_formula" not in found.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--policy", "best"], "--policy"),
        (["--device-tokens", "100"], "--device-tokens"),
        (["--device-tokens", "512"], "longest prompt"),
        (["--device-tokens", "many"], "--device-tokens"),
        (["--host-tokens", "999G"], "--host-tokens"),
        (["--plot", "ttft.txt"], "--plot"),
    ],
)
def test_command_says_in_one_sentence_what_is_wrong(small: Path, arguments: list[str], problem: str) -> None:
    found = invoke("--trace", str(small), *arguments)
    assert isinstance(found.exception, ConfigError | InvalidInputError)
    assert problem in str(found.exception)


def test_no_policy_given_is_all_of_them() -> None:
    assert policy_names([]) == list(POLICIES)
    assert policy_names(["random,hotness", "random"]) == ["random", "hotness"]
