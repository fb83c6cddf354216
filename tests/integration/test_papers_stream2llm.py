"""Stream2LLM's evaluation in the simulator: its cells, what they stand beside, and that what they say comes out."""

import json
from typing import Any

import pytest

from cluster_core.engine_jobs import SessionMode
from cluster_sim.workloads.streaming import WorkloadSpec, draw_trace
from tests.fakes.reports import HeardReports

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def paper() -> Any:
    from benchmarks.papers import stream2llm

    return stream2llm


def _spec(mode: str = "append", sessions: int = 60, rate_per_s: float = 4.0, **fields: Any) -> WorkloadSpec:
    return WorkloadSpec(SessionMode(mode), sessions, rate_per_s, **fields)


def test_each_published_number_has_a_cell(paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.papers.stream2llm_replay import Run

    # This test is about the cells; replaying all traces takes hours.
    monkeypatch.setattr(paper, "_replayed", lambda trace, variant: Run([1.0], 4, 1, 0.5))
    told: list[str] = []
    cells = paper.run(told.append, quick=False)
    published = json.loads(paper._PUBLISHED.read_text())
    assert len(cells) == 2 * 4 * 5 * 4 + 2 * 3 * 5 * 4 + 2 * (3 * 4 + 4)
    assert len({(each.figure, each.cell) for each in cells}) == len(cells)
    by_name = {(each.figure, each.cell): each for each in cells}
    wanted = published["ttft"]["crawler"]["2"]
    assert by_name["Figure 8", "crawler 2/s vLLM-S P95"].paper == wanted["streaming_s"][1] == 0.3779
    assert by_name["Figure 8", "crawler 2/s fcfs P50"].paper == wanted["speedups"]["fcfs"][0] == 4.811
    assert by_name["Table 3", "anns recompute mcps P99"].paper == 0.189
    assert by_name["Table 4", "crawler recompute lcas"].paper == pytest.approx(12_564 / 43.22)
    assert by_name["Table 4", "crawler cost fcfs, swapped"].paper == 0.21
    assert by_name["Table 4", "crawler cost fcfs, swapped"].ours == 0.25
    assert all(each.why for each in cells if each.ratio is not None and not 0.8 <= each.ratio <= 1.25)
    assert len(told) == 14 * 5


def test_times_count_from_the_end_of_the_context() -> None:
    from benchmarks.papers.stream2llm_replay import Variant, cost_model, replay
    from cluster_sim.costs.step_work import prefill_work

    spec = _spec(sessions=1)
    (session,) = draw_trace(spec, 256, 131_072)
    (waited_s,) = replay(spec, Variant(None)).ttft_s
    tokens, done, expected_s = len(session.prompt), 0, 0.0
    while done < tokens:
        expected_s += cost_model().step_s(prefill_work([(done, min(2048, tokens - done))]))
        done += 2048
    assert waited_s == pytest.approx(expected_s)
    (streamed_s,) = replay(spec, Variant("fcfs")).ttft_s
    assert streamed_s < waited_s


def test_the_same_run_again_gives_the_same_times() -> None:
    from benchmarks.papers.stream2llm_replay import Variant, replay

    first = replay(_spec("update", 25, 2.0), Variant("lcas"))
    assert first == replay(_spec("update", 25, 2.0), Variant("lcas"))
    assert first != replay(_spec("update", 25, 2.0, seed=1), Variant("lcas"))


def test_streaming_pays_and_the_order_matters_where_the_engine_is_busy() -> None:
    from benchmarks.papers.stream2llm_replay import Variant, replay

    spec = _spec(sessions=80, coupled=True)
    waiting, stock, fcfs = (replay(spec, Variant(policy)) for policy in (None, "default_vllm", "fcfs"))
    assert waiting.quantile(0.5) > 4 * fcfs.quantile(0.5)
    assert stock.quantile(0.95) > 1.5 * fcfs.quantile(0.95)


def test_beyond_capacity_the_default_order_loses_nowhere_to_waiting_as_the_published_ones_do() -> None:
    from benchmarks.papers.stream2llm import spec
    from benchmarks.papers.stream2llm_replay import Variant, replay

    trace = spec("crawler", 300, 10.0)
    waiting, fcfs, default = (replay(trace, Variant(policy)) for policy in (None, "fcfs", "default"))
    shares = (0.5, 0.9, 0.99)
    assert all(default.quantile(share) < waiting.quantile(share) for share in shares)
    assert not all(fcfs.quantile(share) < waiting.quantile(share) for share in shares)


def test_a_quantile_is_one_of_the_times() -> None:
    from benchmarks.papers.stream2llm_replay import Run

    run = Run([float(each) for each in range(1, 101)])
    assert [run.quantile(share) for share in (0.5, 0.95, 0.99, 0.999)] == [50, 95, 99, 100]


def test_contexts_of_more_pages_have_more_tokens_where_both_are_drawn_as_one() -> None:
    def ranks_agree(coupled: bool) -> float:
        trace = draw_trace(_spec(sessions=60, coupled=coupled), 256, 131_072)
        sizes = [(len(each.inputs), len(each.prompt)) for each in trace]
        pairs = [(one, other) for one in sizes for other in sizes if one[0] < other[0]]
        return sum(one[1] < other[1] for one, other in pairs) / len(pairs)

    assert ranks_agree(True) > 0.99
    assert ranks_agree(False) < 0.75


async def test_a_sweep_over_the_load_compares_each_order_with_waiting_and_says_what_was_thrown_away() -> None:
    from benchmarks.streaming_simulated import bench_streaming_simulated

    arguments = {"mode": "update", "sessions": 25, "seed": 3, "policies": ["default", "fcfs"], "loads": [0.5, 1.2]}
    told = HeardReports()
    result = await bench_streaming_simulated(arguments, told)
    assert result == await bench_streaming_simulated(arguments, HeardReports())
    assert told.steps_done == told.steps_in_all == 1 + 2 * 3
    low, high = result["loads"]
    assert high["rate_per_s"] == pytest.approx(1.2 * result["saturation_per_s"], abs=0.001)
    for row in (low, high):
        waited, default = row["policies"]["ns"], row["policies"]["default"]
        assert set(waited["speedup_vs_ns"].values()) == {1.0}
        assert 0 < default["invalidated_tokens"] < default["computed_tokens"]
        ratio = waited["ttft_after_finish_s"]["p50"] / default["ttft_after_finish_s"]["p50"]
        assert default["speedup_vs_ns"]["p50"] == pytest.approx(ratio, rel=0.01)
    assert high["policies"]["ns"]["busy_share"] > low["policies"]["ns"]["busy_share"]
