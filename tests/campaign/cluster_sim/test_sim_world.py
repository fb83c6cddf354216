"""The simulated cluster as a whole: a request's way by hand, scenario files, the command."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster_configs.schema import PlacementSection
from cluster_core.engine_jobs import SessionMode
from cluster_core.errors import ConfigError
from cluster_sim import scenario
from cluster_sim.dispatch_settings import DispatchSettings
from cluster_sim.engines.engine import SimInput
from cluster_sim.engines.light_engine import LightEngine, LightEngineSettings
from cluster_sim.worker import PoolSettings
from cluster_sim.workloads.opening import open_workload
from cluster_sim.workloads.requests import SimRequest, block_names
from cluster_sim.workloads.section import WorkloadSection
from cluster_sim.world import POOLS, Fault, World, WorldSettings
from tests.command import rachis
from tests.fakes.sim_world import BLOCK, Costs, run

HOP_S = 0.0005


def request(arrival_s: float, tokens: int, output_tokens: int = 1, name: int = 1) -> SimRequest:
    blocks = np.arange(tokens // BLOCK, dtype=np.uint64) + np.uint64(1 + 1000 * name)
    return SimRequest(arrival_s, tokens, output_tokens, block_names(blocks))


def world(prefill: int = 1, decode: int = 1, *, blocks: int = 100, **given: Any) -> World:
    costs = Costs()
    placement = PlacementSection(**{"disaggregation": "always", **given.pop("placement", {})})
    settings = LightEngineSettings(BLOCK, blocks, max_batched_tokens=given.pop("budget", 8192))
    pools = {
        name: PoolSettings(number, costs, lambda: LightEngine(costs, settings))
        for name, number in (("prefill", prefill), ("decode", decode))
    }
    return World("by hand", WorldSettings(pools, BLOCK, placement, index_entries=1 << 12, **given))


def test_a_requests_times_by_hand() -> None:
    """100 tokens of prompt, 5 of answer: prefill, pull, the first token's KV with the second one, three steps more."""
    figures = run(world(), request(0.0, 100, 5))
    assert figures.outcomes == {"finished": 1}
    ttft_s = HOP_S + 0.1 + HOP_S
    assert figures.ttft_s.mean == pytest.approx(ttft_s)
    pull_s = 0.003 + 100 * 1000 / 1e6
    assert figures.transfer_s.mean == pytest.approx(pull_s)
    assert figures.transferred_bytes == 100_000
    rest_s = HOP_S + pull_s + 0.001 + 3 * 0.01 + HOP_S
    assert figures.e2e_s.mean == pytest.approx(ttft_s + rest_s)
    assert figures.tpot_s.mean == pytest.approx(rest_s / 4)
    assert (figures.gpus, figures.generated_tokens) == (4, 5)
    assert figures.dollars_per_million_tokens == pytest.approx(4 * 3 * (ttft_s + rest_s) / 3600 / 5 * 1e6)


def test_what_software_takes_for_a_pull_comes_on_top_of_the_transfer() -> None:
    plain, slower = (run(world(pull_s=pull_s), request(0.0, 100, 5)) for pull_s in (0.0, 0.02))
    assert slower.transfer_s.mean == pytest.approx(plain.transfer_s.mean + 0.02)
    assert slower.e2e_s.mean == pytest.approx(plain.e2e_s.mean + 0.02)
    assert slower.ttft_s.mean == plain.ttft_s.mean


def test_sessions_are_spread_over_prefill_workers() -> None:
    """Steps take the same everywhere, so that workers differ by a hair: all would go to one."""
    made = world(prefill=4, blocks=4000)
    asked = WorkloadSection(kind="crawler", requests=200, requests_per_s=0.4, token_scale=0.3, block_tokens=BLOCK)
    run(made, *open_workload(asked, 0))
    computed = [
        sum(each.prefill_tokens for each in worker.totals())
        for worker in made.workers.values()
        if worker.pool == POOLS["prefill"]
    ]
    assert max(computed) < 1.3 * sum(computed) / 4, computed


def test_a_prompt_that_goes_through_both_pools_is_counted_as_asked_for() -> None:
    made, asked = world(), request(0.0, 100, 5)
    run(made, asked)
    assert (made.index.hotness(asked.keys, made.events.now_s) > 0).all()


def test_an_aggregated_service_prefills_where_it_decodes() -> None:
    figures = run(world(prefill=0), request(0.0, 100, 5))
    assert figures.ttft_s.mean == pytest.approx(HOP_S + 0.1 + HOP_S)
    assert figures.e2e_s.mean == pytest.approx(HOP_S + 0.1 + 4 * 0.01 + HOP_S)
    assert (figures.local_prefills, figures.transferred_bytes) == (1, 0)


def test_a_prompt_that_was_seen_before_is_not_computed_again() -> None:
    figures = run(world(), request(0.0, 100, 2), request(1.0, 100, 2), request(2.0, 100, 2, name=2))
    assert (figures.device_hit_tokens, figures.prompt_tokens) == (90, 300)
    assert figures.transferred_bytes == (100 + 10 + 100) * 1000, "the decode worker had it as well"


@pytest.mark.parametrize(
    ("slo", "attained"),
    [
        ({}, 1),
        ({"slo_ttft_s": 0.1}, 0),
        ({"slo_ttft_s": 0.102}, 1),
        ({"slo_tpot_s": 0.03}, 0),
        ({"slo_tpot_s": 0.04}, 1),
    ],
)
def test_a_request_attains_when_it_keeps_both_objectives(slo: dict[str, Any], attained: int) -> None:
    """TTFT 0.101 s, TPOT 0.036 s."""
    assert run(world(**slo), request(0.0, 100, 5)).attained == attained


def test_a_sessions_objective_counts_from_the_end_of_its_prompt() -> None:
    asked = session(0.0, (0.0, 100, 0, False), (1.0, 150, 100, False))
    assert run(world(slo_ttft_s=0.06), asked).attained == 1


def test_requests_for_a_worker_that_is_gone_go_elsewhere_until_it_is_back() -> None:
    made = world(2, 1, faults=[Fault(1.0, "kill", "prefill-0000", for_s=60.0)])
    figures = run(made, *(request(0.5 * number, 20, 2, name=number) for number in range(60)))
    assert figures.outcomes == {"finished": 60}
    assert figures.retries <= 2, "one hears of it, the others are not sent there"


@pytest.mark.parametrize(("disaggregation", "some"), [("conditional", True), ("always", False)])
def test_a_short_prompt_may_be_prefilled_where_it_is_decoded(disaggregation: str, some: bool) -> None:
    made = world(placement={"disaggregation": disaggregation})
    figures = run(made, *(request(0.5 * number, 20, 3, name=number) for number in range(40)))
    assert (figures.local_prefills > 0) is some


def test_the_router_counts_a_prompt_until_it_is_computed_and_remembers_that_it_was_asked_for() -> None:
    made = world(0, 1)
    asked = request(0.0, 100, 30)
    counted: dict[float, float] = {}

    def look(at_s: float) -> None:
        counted[at_s] = float(made.membership.candidates(POOLS["decode"], at_s).uncomputed_tokens[0])

    for at_s in (0.05, 0.2, 2.0):
        made.events.at(at_s, partial(look, at_s))
    run(made, asked, request(3.0, 10, 1, name=2))
    assert counted == {0.05: 100, 0.2: 0, 2.0: 0}
    assert (made.index.hotness(asked.keys, made.events.now_s) > 0).all()


def test_imbalance_is_the_busiest_over_the_mean() -> None:
    figures = run(world(2, 1), *(request(1.0 * number, 100, 2) for number in range(5)))
    assert figures.imbalance["prefill"] == pytest.approx(2.0)


def test_the_index_hears_of_a_worker_late_and_of_its_last_start_only() -> None:
    """The prompt is there after 0.1 s; the worker dies at 5.9 s, and is back with its report at 6 s."""
    made = world(1, 1, event_delay_s=1.0, faults=[Fault(5.9, "kill", "prefill-0000", for_s=0.05)])
    asked = request(0.0, 100, 2)
    heard: dict[float, int] = {}

    def listen(at_s: float) -> None:
        claims, _ = made.index.claims("prefill-0000")
        heard[at_s] = int(np.isin(asked.keys, claims).sum())

    for at_s in (0.9, 1.2, 5.9, 6.1):
        made.events.at(at_s, partial(listen, at_s))
    # The second one is told of after the worker has started again.
    run(made, asked, request(5.5, 100, 2, name=2), request(7.5, 10, 1, name=3))
    assert heard == {0.9: 0, 1.2: 10, 5.9: 10, 6.1: 0}
    assert not np.isin(request(0.0, 100, name=2).keys, made.index.claims("prefill-0000")[0]).any()


def test_decoding_shares_its_steps_with_a_prompt_that_comes_meanwhile() -> None:
    """The one that decodes waits for 50 tokens of the other's prompt at a time."""
    figures = run(world(prefill=0, budget=51), request(0.0, 50, 11), request(0.1, 100, 2, name=2))
    alone_s = HOP_S + 0.05 + 10 * 0.01 + HOP_S
    assert figures.e2e_s.quantile(1.0) == pytest.approx(alone_s + 0.1, rel=0.01)


def test_a_prompt_that_fits_no_worker_is_refused() -> None:
    figures = run(world(blocks=5), request(0.0, 60, 2), request(0.0, 20, 2, name=2))
    assert figures.outcomes == {"refused": 1, "finished": 1}


def test_who_takes_too_long_expires_and_leaves_nothing() -> None:
    settings = DispatchSettings(timeout_s=0.15)
    figures = run(world(dispatch=settings), request(0.0, 100, 5), request(1.0, 20, 2, name=2))
    assert figures.outcomes == {"expired": 1, "finished": 1}


@pytest.mark.parametrize("deadline_s", [0.01, 0.15])
def test_a_pull_that_is_late_is_given_up_and_the_prompt_computed_where_it_decodes(deadline_s: float) -> None:
    """By 0.01 s the pull is under way; by 0.15 s the second request still waits for the room of the first."""
    settings = DispatchSettings(handoff_deadline_s=deadline_s)
    asked = [request(0.0, 100, 30), request(0.0, 100, 2, name=2)] if deadline_s > 0.1 else [request(0.0, 100, 5)]
    figures = run(world(2, 1, blocks=15, dispatch=settings), *asked)
    assert figures.outcomes == {"finished": len(asked)}
    assert figures.retries == 1


def test_who_arrives_in_the_warm_up_is_served_and_not_measured() -> None:
    settings = DispatchSettings(warm_up_s=1.0)
    figures = run(world(dispatch=settings, slo_ttft_s=0.2), request(0.0, 400, 2), request(2.0, 100, 2, name=2))
    assert (figures.requests, figures.measured, figures.attained, figures.ttft_s.count) == (2, 1, 1, 1)
    assert figures.attainment == 1.0


@pytest.mark.parametrize(
    ("at_s", "pool", "outcomes", "retries"),
    [
        (0.05, "prefill", {"finished": 1}, 1),  # prefilling: another one does it
        (0.12, "prefill", {"finished": 1}, 1),  # being pulled: computed again where it decodes
        (0.12, "decode", {"finished": 1}, 1),  # pulling: another decode worker
        (0.22, "decode", {"finished": 1}, 1),  # answering: it goes on elsewhere
        (0.5, "decode", {"finished": 1}, 0),
    ],
)
def test_a_worker_that_dies_costs_an_attempt_or_the_answer(
    at_s: float, pool: str, outcomes: dict[str, int], retries: int
) -> None:
    plain = world(2, 2)
    run(plain, request(0.0, 100, 5))
    (worker,) = [name for name, each in plain.workers.items() if name.startswith(pool) and each.engine.totals.busy_s]
    figures = run(world(2, 2, faults=[Fault(at_s, "kill", worker, for_s=1.0)]), request(0.0, 100, 5))
    assert (figures.outcomes, figures.retries) == (outcomes, retries)


def session(arrival_s: float, *inputs: tuple[float, int, int, bool], output_tokens: int = 2) -> SimRequest:
    """inputs: seconds after the arrival, length of the prompt then, of it unchanged, and whether it replaces."""
    pieces, last = [], len(inputs) - 1
    for number, (after_s, length, kept, replaces) in enumerate(inputs):
        before = inputs[number - 1][1] if number else 0
        tokens = [number] * (length if replaces else length - before)
        keys = request(0.0, length, name=number).keys
        pieces.append((after_s, SimInput(tokens, length, kept, keys, replaces, is_last=number == last)))
    mode = SessionMode.UPDATE if any(each[3] for each in inputs) else SessionMode.APPEND
    return SimRequest(arrival_s, inputs[-1][1], output_tokens, pieces[-1][1].keys, inputs=tuple(pieces), mode=mode)


def test_what_has_come_of_a_session_is_computed_while_the_rest_comes() -> None:
    """All but the last token of 100 when the last 50 come: 51 to compute."""
    figures = run(world(), session(0.0, (0.0, 40, 0, False), (0.1, 100, 40, False), (1.0, 150, 100, False)))
    assert figures.ttft_s.mean == pytest.approx(0.051 + 2 * HOP_S)
    assert figures.ttft_open_s.mean == pytest.approx(1.051 + 2 * HOP_S)
    assert figures.invalidated_tokens == 0


def test_what_a_session_has_replaced_is_computed_again_from_its_block_on() -> None:
    """99 of 100 were computed, 65 still stand, of them 60 in whole blocks."""
    figures = run(world(), session(0.0, (0.0, 100, 0, False), (1.0, 110, 65, True)))
    assert figures.ttft_s.mean == pytest.approx(0.050 + 2 * HOP_S)
    assert figures.invalidated_tokens == 39


def test_an_update_waits_for_the_step_that_runs() -> None:
    figures = run(world(), session(0.0, (0.0, 100, 0, False), (0.05, 100, 0, True)))
    assert figures.ttft_s.mean == pytest.approx(0.049 + 0.1 + 2 * HOP_S, abs=1e-3)
    assert figures.invalidated_tokens == 99


def test_a_prompt_that_became_shorter_still_gets_its_last_token_computed() -> None:
    figures = run(world(), session(0.0, (0.0, 100, 0, False), (1.0, 80, 80, True)))
    assert figures.outcomes == {"finished": 1}
    assert figures.ttft_s.mean == pytest.approx(0.001 + 2 * HOP_S)


def test_a_session_that_loses_its_worker_goes_on_with_what_has_come() -> None:
    asked = session(0.0, (0.0, 100, 0, False), (1.0, 150, 100, False))
    plain = world(2, 1)
    run(plain, asked)
    (worker,) = [name for name, each in plain.workers.items() if "prefill" in name and each.engine.totals.busy_s]
    figures = run(world(2, 1, faults=[Fault(0.5, "kill", worker, 1.0)]), asked)
    assert (figures.outcomes, figures.retries) == ({"finished": 1}, 1)
    assert figures.ttft_s.mean == pytest.approx(0.051 + 2 * HOP_S)


def test_a_session_without_prefill_workers_is_computed_when_it_is_whole() -> None:
    figures = run(world(0, 1), session(0.0, (0.0, 100, 0, False), (1.0, 150, 100, False)))
    assert figures.ttft_s.mean == pytest.approx(0.150 + 2 * HOP_S)


def test_a_slow_worker_and_a_thin_link_take_longer_and_recover() -> None:
    plain = run(world(), request(0.0, 100, 5)).e2e_s.mean
    slow = run(world(faults=[Fault(0.0, "slow", "prefill-0000", 1.0, 3.0)]), request(0.0, 100, 5)).e2e_s.mean
    thin = run(world(faults=[Fault(0.0, "link", "decode-0000", 9.0, 3.0)]), request(0.0, 100, 5)).e2e_s.mean
    after = run(world(faults=[Fault(0.0, "slow", "prefill-0000", 1.0, 3.0)]), request(2.0, 100, 5)).e2e_s.mean
    assert slow == pytest.approx(plain + 0.2)
    assert thin == pytest.approx(plain + 0.2)
    assert after == pytest.approx(plain)


def test_nothing_of_a_request_is_kept_after_it() -> None:
    made = world(2, 2)
    section = WorkloadSection(
        kind="prefix_groups", requests=80, requests_per_s=4, shared_tokens=50, own_tokens=20, output_tokens=5,
        block_tokens=BLOCK,
    )  # fmt: skip
    sizes = []
    # A leak of state of requests that have ended is visible nowhere else.
    running, still_open = made.dispatcher._running, made.dispatcher._open
    made.run(open_workload(section), lambda number: sizes.append(len(running) + len(made.events)))
    assert max(sizes) < 2 * 80 and not running
    assert len(still_open) == 0


# Scenario files and the command


QUICK = """
name: tiny
seed: 5
pools: { prefill: { workers: 1 }, decode: { workers: 1 } }
workload: { kind: prefix_groups, requests: 6, requests_per_s: 20, block_tokens: 32 }
slo: { ttft_ms: 500, tpot_ms: 50 }
variants:
  - name: ours
  - name: theirs
    placement: { policy: round_robin }
    pools: { decode: { workers: 2 } }
"""


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    path = tmp_path / "quick.yaml"
    path.write_text(QUICK)
    return path


def test_variants_change_what_they_name_and_nothing_else(quick: Path) -> None:
    ours, theirs = scenario.read(quick, {"workload.requests": 7}).variants
    assert (ours.name, ours.placement.policy, ours.pools.decode.workers) == ("ours", "default", 1)
    assert (theirs.name, theirs.placement.policy, theirs.pools.decode.workers) == ("theirs", "round_robin", 2)
    assert theirs.pools.prefill.workers == 1
    assert ours.workload.requests == theirs.workload.requests == 7
    assert ours.seed == 5


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("engine: heavy", "engine: Input should be 'light' or 'vllm', got 'heavy'"),
        ("pool: {}", "pool: Extra inputs are not permitted"),
        ("pools: { decode: { workers: 0 } }", "pools.decode.workers: must be at least 1"),
        ("workload: { requests: -1 }", "workload.requests: Input should be greater than or equal to 0, got -1"),
        ("variants: [a]", "variants: must be a list of tables"),
        ("variants: [{name: a}, {name: a}]", "variants: must have names of their own"),
        ("seed: [", "is not valid YAML"),
    ],
)
def test_what_cannot_be_is_told_by_its_key(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(line)
    with pytest.raises(ConfigError) as raised:
        scenario.read(path)
    assert told in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_fault_on_a_worker_that_is_not_there_is_refused(quick: Path) -> None:
    fault = {"at_s": 1, "kind": "kill", "worker": "decode-0007"}
    (ours, _) = scenario.read(quick, {"faults": [fault]}).variants
    with pytest.raises(ConfigError, match=r"no worker decode-0007"):
        scenario.make_world(ours, block_tokens=32)


def test_the_command_prints_the_same_json_each_time(quick: Path) -> None:
    results = [rachis("simulate", quick, "--json") for _ in range(2)]
    assert results[0].exit_code == 0, results[0].output
    assert results[0].stdout == results[1].stdout
    told = json.loads(results[0].stdout)
    assert [each["name"] for each in told["variants"]] == ["ours", "theirs"]
    assert all(each["outcomes"] == {"finished": 6} for each in told["variants"])


def test_the_command_prints_a_table_for_people(quick: Path) -> None:
    result = rachis("simulate", quick, "--set", "workload.requests=5")
    assert result.exit_code == 0, result.output
    assert "TTFT P90" in result.stdout and "theirs" in result.stdout


def test_a_later_variant_is_refused_before_an_earlier_one_runs(quick: Path) -> None:
    quick.write_text(QUICK.replace("placement: { policy: round_robin }", "cost_model: abacus"))
    result = rachis("simulate", quick, "--set", "workload.requests=1000000")
    assert "abacus" in str(result.exception)


def test_a_section_that_is_none_is_refused(quick: Path) -> None:
    with pytest.raises(ConfigError, match="pools"):
        scenario.read(quick, {"pools": 3, "pools.decode.workers": 2})


@pytest.mark.parametrize("change", ["seed", "=3", "workload.requests=["])
def test_a_change_that_is_none_is_refused(quick: Path, change: str) -> None:
    result = rachis("simulate", quick, "--set", change)
    assert isinstance(result.exception, ConfigError)
    assert "--set" in str(result.exception)
