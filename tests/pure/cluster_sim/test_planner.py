"""The search for the smallest pools, over made-up clusters whose answer is known."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_core.errors import ClientFault, InvalidInputError
from cluster_sim import planner
from cluster_sim.planner import PlanSettings, plan
from cluster_sim.reports.figures import Figures
from command_line.simulation.plan_run import Options, plan_command
from tests.planting import planted

REQUESTS = 200


class Cluster:
    """kept: what share of requests is within (TTFT, TPOT) for so many workers. Counts its runs."""

    def __init__(self, kept: Callable[[int, int], tuple[float, float]], busy_s: tuple[float, float] = (0.0, 0.0)):
        self.kept = kept
        self.busy_s = busy_s
        self.runs: Counter[tuple[int, int]] = Counter()

    def __call__(self, prefill: int, decode: int) -> Figures:
        self.runs[prefill, decode] += 1
        figures = Figures("made up", {"prefill": prefill, "decode": decode}, prefill + decode, prefill + decode)
        figures.slo_ttft_s, figures.slo_tpot_s = 1.0, 0.05
        within_ttft, within_tpot = (round(share * REQUESTS) for share in self.kept(prefill, decode))
        for number in range(REQUESTS):
            figures.arrivals.add(number / 2, 1)
            figures.ttft_s.add(0.5 if number < within_ttft else 2.0)
            figures.tpot_s.add(0.03 if number >= REQUESTS - within_tpot else 0.08)
        figures.outcomes = {"finished": REQUESTS}
        # Who misses one objective mostly keeps the other: the worst case.
        figures.measured = REQUESTS
        figures.attained = max(0, within_ttft + within_tpot - REQUESTS)
        figures.generated_tokens, figures.duration_s = 1000, 100.0
        figures.busy_s = {"prefill": self.busy_s[0], "decode": self.busy_s[1]}
        return figures

    def keeps(self, prefill: int, decode: int, attainment: float = 0.9) -> bool:
        within = [round(share * REQUESTS) for share in self.kept(prefill, decode)]
        return sum(within) - REQUESTS >= attainment * REQUESTS


def saturating(prefill_needed: float, decode_needed: float) -> Callable[[int, int], tuple[float, float]]:
    """All within the objectives from so many workers on, ever fewer below."""

    def kept(prefill: int, decode: int) -> tuple[float, float]:
        return min(1.0, (prefill / prefill_needed) ** 2), min(1.0, (decode / decode_needed) ** 2)

    return kept


def smallest(cluster: Cluster, most_gpus: int) -> int:
    """GPUs, by trying everything."""
    sizes = range(1, most_gpus)
    return min(p + d for p, d in itertools.product(sizes, sizes) if p + d <= most_gpus and cluster.keeps(p, d))


@pytest.mark.parametrize("needed", [(1, 1), (1, 7), (9, 1), (5, 11), (20, 30), (3.4, 2.7), (1.02, 1.02)])
def test_the_smallest_pools_are_found_in_few_runs(needed: tuple[float, float]) -> None:
    cluster = Cluster(saturating(*needed))
    found = plan(cluster, PlanSettings())
    assert found.best.gpus == smallest(cluster, 64)
    assert cluster.keeps(found.best.prefill, found.best.decode)
    assert found.verified
    assert set(cluster.runs.values()) == {1}
    assert found.runs == sum(cluster.runs.values()) <= 30


def test_all_that_costs_a_gpu_less_around_the_answer_was_tried() -> None:
    cluster = Cluster(saturating(5, 11))
    best = plan(cluster, PlanSettings()).best
    for prefill in range(best.prefill - 3, best.prefill + 4):
        assert (prefill, best.gpus - 1 - prefill) in cluster.runs


def test_the_cost_of_a_worker_less_and_the_aggregated_pool_are_told() -> None:
    found = plan(Cluster(saturating(5, 11)), PlanSettings())
    less_prefill, less_decode, aggregated = found.one_prefill_less, found.one_decode_less, found.aggregated
    assert less_prefill is not None and less_decode is not None and aggregated is not None
    assert (less_prefill.prefill, less_prefill.decode) == (found.best.prefill - 1, found.best.decode)
    assert (less_decode.prefill, less_decode.decode) == (found.best.prefill, found.best.decode - 1)
    assert less_prefill.attainment < 0.9 and less_prefill.ttft_p90_ms > 1000
    assert less_decode.attainment < 0.9 and less_decode.tpot_p90_ms > 50
    assert (aggregated.prefill, aggregated.decode, aggregated.gpus) == (0, found.best.gpus, found.best.gpus)
    rows = planner.table(found)
    assert [row[0] for row in rows] == ["answer", "one prefill less", "one decode less", "aggregated"]
    assert all(len(row) == len(planner.COLUMNS) for row in rows)
    told = json.loads(json.dumps(planner.as_json(found)))
    assert (told["gpus"], told["prefill_workers"]) == (found.best.gpus, found.best.prefill)
    assert len(told["tried"]) == told["simulations"]


def test_the_last_worker_of_a_pool_is_not_taken_away() -> None:
    found = plan(Cluster(saturating(1, 1)), PlanSettings())
    assert (found.best.gpus, found.one_prefill_less, found.one_decode_less) == (2, None, None)
    assert len(planner.table(found)) == 2


def test_a_pool_that_is_worse_than_a_smaller_one_does_not_hide_it() -> None:
    """Bisection alone is led astray: 8 prefill workers fail although 7 and 9 do not."""
    smooth = saturating(7, 4)

    def dented(prefill: int, decode: int) -> tuple[float, float]:
        return (0.5, 1.0) if prefill in (8, 12) else smooth(prefill, decode)

    cluster = Cluster(dented)
    found = plan(cluster, PlanSettings())
    assert found.best.gpus == smallest(cluster, 64) == 11


def test_without_verification_the_dent_would_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, planner, "_AROUND", -1)
    smooth = saturating(7, 4)
    cluster = Cluster(lambda prefill, decode: (0.5, 1.0) if prefill in (8, 12) else smooth(prefill, decode))
    assert plan(cluster, PlanSettings()).best.gpus > smallest(cluster, 64)


def test_workers_of_one_pool_that_do_for_the_other_are_exchanged() -> None:
    """Decode workers prefill too, so what counts is the sum, and the corner of two bisections is not the answer."""

    def coupled(prefill: int, decode: int) -> tuple[float, float]:
        helped = prefill + 0.5 * max(0, decode - 6)
        return min(1.0, helped / 6), min(1.0, decode / 6)

    cluster = Cluster(coupled)
    assert plan(cluster, PlanSettings()).best.gpus == smallest(cluster, 64)


def test_the_work_of_the_first_run_gives_the_least_pools() -> None:
    cluster = Cluster(saturating(20, 10), busy_s=(1700.0, 600.0))
    found = plan(cluster, PlanSettings())
    # 90% of 17 and 6 engine seconds a second.
    assert found.least == (16, 6)
    assert found.best.gpus == smallest(cluster, 64)
    fewer = sum(cluster.runs.values())
    blind = Cluster(saturating(20, 10))
    plan(blind, PlanSettings())
    assert fewer < sum(blind.runs.values())


def test_too_high_a_bound_by_work_is_corrected_downwards() -> None:
    cluster = Cluster(saturating(4, 3), busy_s=(600.0, 500.0))
    assert plan(cluster, PlanSettings()).best.gpus == smallest(cluster, 64)


def test_larger_workers_cost_more() -> None:
    cluster = Cluster(saturating(3, 8))
    settings = PlanSettings(most_gpus=64, prefill_gpus=4, decode_gpus=2)
    found = plan(cluster, settings)
    best = min(
        4 * p + 2 * d for p, d in itertools.product(range(1, 16), range(1, 31)) if cluster.keeps(p, d) and p + d < 40
    )
    assert found.best.gpus == best == 4 * found.best.prefill + 2 * found.best.decode
    assert found.aggregated is not None and found.aggregated.decode == best // 2


@pytest.mark.parametrize(
    ("needed", "says"), [((40, 2), "TTFT is within"), ((2, 40), "TPOT is within"), ((20, 20), "and TPOT")]
)
def test_nothing_keeps_the_objective(needed: tuple[float, float], says: str) -> None:
    cluster = Cluster(saturating(*needed))
    with pytest.raises(InvalidInputError, match="most_gpus: nothing found up to 24 GPUs has 90%") as raised:
        plan(cluster, PlanSettings(most_gpus=24))
    assert says in str(raised.value)
    assert sum(cluster.runs.values()) < 20


def test_all_gpus_in_the_right_division_are_enough() -> None:
    cluster = Cluster(saturating(19, 5))
    found = plan(cluster, PlanSettings(most_gpus=smallest(cluster, 64)))
    assert found.best.gpus == smallest(cluster, 64)


def test_both_objectives_kept_alone_but_not_together_is_said() -> None:
    with pytest.raises(InvalidInputError, match="each objective alone is kept"):
        plan(Cluster(lambda prefill, decode: (0.93, 0.93)), PlanSettings(most_gpus=8))


def test_the_number_of_simulations_is_bounded_and_an_unverified_answer_says_so() -> None:
    cluster = Cluster(saturating(20, 30))
    found = plan(cluster, PlanSettings(most_runs=15))
    assert not found.verified
    assert sum(cluster.runs.values()) <= 15
    assert cluster.keeps(found.best.prefill, found.best.decode)
    with pytest.raises(InvalidInputError, match="ended after 2 simulations"):
        plan(Cluster(saturating(20, 30)), PlanSettings(most_runs=5))


def test_unfinished_requests_are_within_no_objective() -> None:
    def failing(prefill: int, decode: int) -> Figures:
        figures = Cluster(lambda p, d: (1.0, 1.0))(prefill, decode)
        figures.outcomes = {"finished": REQUESTS // 2, "failed": REQUESTS // 2}
        figures.measured, figures.attained = REQUESTS, REQUESTS // 2
        return figures

    with pytest.raises(InvalidInputError, match=r"TTFT is within its objective for 50\.0%"):
        plan(failing, PlanSettings(most_gpus=4))


@pytest.mark.parametrize(
    ("settings", "field"), [({"attainment": 0}, "attainment"), ({"attainment": 1.1}, "attainment"),
                            ({"most_gpus": 1}, "most_gpus"), ({"most_runs": 2}, "most_runs")],
)  # fmt: skip
def test_settings_that_cannot_be_are_named(settings: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: "):
        PlanSettings(**settings)  # type: ignore[arg-type]


def test_each_trial_is_told_once_and_the_same_search_twice_is_the_same() -> None:
    told: list[planner.Trial] = []
    first = plan(Cluster(saturating(5, 11)), PlanSettings(), told.append)
    assert told == list(first.tried)
    assert first == plan(Cluster(saturating(5, 11)), PlanSettings())


# The command.


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """10 prompts of 4,000 tokens in a second, of which one worker prefills about 9 a second."""
    rng = random.Random(0)
    lines = [
        {
            "timestamp": number * 100,
            "input_length": 4000,
            "output_length": rng.randrange(10, 40),
            "hash_ids": list(range(number * 10, number * 10 + 8)),
        }
        for number in range(10)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return Options(trace, slo_ttft_ms=200, slo_tpot_ms=30, most_gpus=8)


def test_the_command_plans_a_trace(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    plan_command(options, as_json_text=True)
    told = json.loads(capsys.readouterr().out)
    assert told["verified"] is True
    assert told["best"]["attainment"] >= 0.9
    assert told["gpus"] == told["prefill_workers"] + told["decode_workers"] > 2
    assert all(each is None or each["attainment"] < 0.9 for each in (told["one_prefill_less"], told["one_decode_less"]))


def test_the_command_prints_a_plan_for_people(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    options.trace.write_text("\n".join(options.trace.read_text().splitlines()[:3]))
    plan_command(options, as_json_text=True)
    told = json.loads(capsys.readouterr().out)
    plan_command(options, as_json_text=False)
    printed = capsys.readouterr().out
    assert f"{told['gpus']} GPUs: {told['prefill_workers']} prefill and {told['decode_workers']} decode" in printed
    assert max(map(len, printed.splitlines()[:5])) <= 100


def test_the_command_says_what_cannot_be_kept(options: Options) -> None:
    with pytest.raises(ClientFault, match=r"^--most-gpus: nothing found up to 2 GPUs has 90%.*TTFT is within"):
        plan_command(replace(options, slo_ttft_ms=60, most_gpus=2), as_json_text=True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"slo_ttft_ms": 0, "slo_tpot_ms": 0}, "--slo-ttft-ms"),
        ({"slo_tpot_ms": -1}, "--slo-tpot-ms"),
        ({"speed": 0}, "--speed"),
        ({"requests": -1}, "--requests"),
        ({"attainment": 2}, "--attainment"),
        ({"most_gpus": 1}, "--most-gpus"),
    ],
)
def test_options_that_cannot_be_are_named(options: Options, change: dict[str, float], field: str) -> None:
    with pytest.raises(ClientFault, match=f"^{field}: "):
        plan_command(replace(options, **change), as_json_text=True)  # type: ignore[arg-type]
