"""What an imitated service is loaded with, and what the simulator is told of it."""

from collections.abc import Sequence
from functools import cache
from itertools import takewhile

import pytest

from benchmarks.validation.imitated import SETTINGS
from benchmarks.validation.loads import LOADS, WORKLOADS, busiest_s, drawn, prompts_of
from benchmarks.validation.simulated import costs_of, scenario_of
from benchmarks.validation.software import Software, software_of
from cluster_configs import loading
from cluster_core.errors import ConfigError
from cluster_sim.workloads.requests import SimRequest
from tests.fakes.imitated_service import COSTS, MAX_BATCHED_TOKENS, point

BLOCK_TOKENS, VOCABULARY = 32, 1000
WORKERS = {"prefill": 2, "decode": 2}


@cache
def of_workload(name: str, share: float = 0.5, seconds: float = 20.0) -> list[SimRequest]:
    return drawn(WORKLOADS[name], share, seconds, COSTS, WORKERS, BLOCK_TOKENS, 1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_load_is_a_share_of_what_the_busier_pool_can_do(name: str) -> None:
    """As far as Poisson arrivals of half a minute can be held to it."""
    requests = of_workload(name, LOADS["middle"], 30.0)
    asked = busiest_s(requests, COSTS, WORKERS, BLOCK_TOKENS) * len(requests) / requests[-1].arrival_s
    assert asked == pytest.approx(LOADS["middle"], rel=0.4)


def test_twice_the_workers_get_twice_the_requests() -> None:
    twice = {name: 2 * number for name, number in WORKERS.items()}
    workload = WORKLOADS["long_prompts"]
    many = drawn(workload, 0.5, 20.0, COSTS, twice, BLOCK_TOKENS, 1)
    assert len(many) == pytest.approx(2 * len(of_workload("long_prompts")), rel=0.1)


def test_prompts_share_tokens_just_where_requests_share_blocks() -> None:
    requests = of_workload("agents", seconds=10.0)
    prompts = prompts_of(requests, BLOCK_TOKENS, VOCABULARY, 1)
    assert [len(each.token_ids) for each in prompts] == [each.prompt_tokens for each in requests]
    pairs = 0
    for one, first in zip(requests, prompts, strict=True):
        for other, second in zip(requests, prompts, strict=True):
            if one is not other:
                blocks = _common(one.keys.tolist(), other.keys.tolist())
                tokens = _common(first.token_ids, second.token_ids)
                assert tokens // BLOCK_TOKENS == blocks
                pairs += blocks > 0
    assert pairs


def test_two_seeds_share_no_block_so_that_one_run_finds_nothing_of_another() -> None:
    for name in WORKLOADS:
        one, other = (
            {key for each in drawn(WORKLOADS[name], 0.5, 5.0, COSTS, WORKERS, BLOCK_TOKENS, seed) for key in each.keys}
            for seed in (1, 2)
        )
        assert one
        assert not one & other, name


def test_a_session_is_sent_in_the_pieces_in_which_the_simulator_takes_it() -> None:
    requests = of_workload("retrieval")
    for request, prompt in zip(requests, prompts_of(requests, BLOCK_TOKENS, VOCABULARY, 1), strict=True):
        assert [at_s for at_s, _ in prompt.pieces] == [at_s for at_s, _ in request.inputs]
        assert [len(tokens) for _, tokens in prompt.pieces] == [len(given.tokens) for _, given in request.inputs]
        assert len(prompt.token_ids) == request.prompt_tokens
        assert max(prompt.token_ids) < VOCABULARY


def test_software_is_what_is_left_beside_the_cost_model() -> None:
    """Of prompts of one step and of two."""
    software = software_of(
        [point(tokens, 0.003, 0.005, 0.002) for tokens in (32, 1024, 3500)], COSTS, MAX_BATCHED_TOKENS
    )
    assert software.hop_s == pytest.approx(0.003)
    assert software.pull_s == pytest.approx(0.005)
    assert software.step_start_s == pytest.approx(0.002)


def test_who_is_faster_than_the_model_says_costs_nothing_and_does_not_pay() -> None:
    software = software_of([point(1024, 0.003, -0.005, -0.001)], COSTS, MAX_BATCHED_TOKENS)
    assert (software.pull_s, software.step_start_s) == (0.0, 0.0)


def test_the_scenario_has_the_services_own_configuration() -> None:
    config = loading.load(flags={**SETTINGS, "streaming.policy": "lcas", "pools.decode.workers": 3}).config
    scenario = scenario_of(config, Software(0.002, 0.004, 0.001), seed=7)
    assert (scenario.pools.prefill.workers, scenario.pools.decode.workers) == (2, 3)
    assert scenario.pools.prefill.device_tokens == COSTS.device_tokens
    assert scenario.pools.prefill.host_tokens == 16 * 2**30 // COSTS.kv_bytes_per_token
    assert (scenario.streaming.policy, scenario.placement.seed) == ("lcas", 7)
    assert (scenario.router.hop_ms, scenario.router.pull_ms, scenario.pools.decode.step_start_ms) == (2.0, 4.0, 1.0)
    assert scenario.router.report_s == 1.25


def test_a_service_that_imitates_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device"):
        costs_of(loading.load(flags={}).config)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many they begin with alike."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
