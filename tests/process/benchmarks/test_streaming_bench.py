"""The replay against the fake engine, and what is made of its times. Traces here last milliseconds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.streaming import bench_streaming, compare, describe, names_of_runs
from benchmarks.streaming_replay import Replay, SessionTimes, replay
from cluster_configs.schema import RachisConfig
from cluster_core.engine_jobs import SessionMode, SessionProgress, SessionRecord
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import ConfigError, OutOfRangeError, UnavailableError
from cluster_sim.workloads.streaming import TimedInput, TracedSession, WorkloadSpec, draw_trace
from tests.command import rachis
from tests.fakes.engine import FakeEngine
from tests.fakes.reports import HeardReports


def trace(mode: SessionMode, sessions: int = 5) -> tuple[TracedSession, ...]:
    spec = WorkloadSpec(mode, sessions, rate_per_s=1000.0, token_scale=0.01, time_scale=0.0001)
    return draw_trace(spec, vocabulary_size=256, max_model_len=512)


@pytest.mark.parametrize("mode", SessionMode)
@pytest.mark.parametrize("streamed", [True, False])
async def test_engine_gets_every_final_prompt_once_whether_streamed_or_not(mode: SessionMode, streamed: bool) -> None:
    engine, sessions, done = FakeEngine(), trace(mode), list[None]()
    run = await replay(engine, sessions, lambda: done.append(None), streamed=streamed)
    assert sorted(job.token_ids for job in engine.jobs) == sorted(each.prompt for each in sessions)
    assert [each.mode for each in engine.sessions] == ([mode] * len(sessions) if streamed else [])
    assert all((each.record is not None) == streamed for each in run.sessions)
    assert len(done) == len(sessions)
    assert engine.status().load.running_requests == 0


async def test_streamed_session_sends_each_of_its_inputs() -> None:
    engine, sessions = FakeEngine(), trace(SessionMode.APPEND)
    run = await replay(engine, sessions, lambda: None, streamed=True)
    for session, times in zip(sessions, run.sessions, strict=True):
        assert times.record is not None
        assert times.record.tokens.inputs == len(session.inputs)
        assert times.record.tokens.received_tokens == len(session.prompt)


@pytest.mark.parametrize("streamed", [True, False])
async def test_both_ttfts_end_with_the_same_first_token_and_begin_as_in_the_trace(streamed: bool) -> None:
    sessions = trace(SessionMode.UPDATE)
    run = await replay(FakeEngine(), sessions, lambda: None, streamed=streamed)
    for session, times in zip(sessions, run.sessions, strict=True):
        retrieval_ms = (session.finish_s - session.arrival_s) * 1000
        assert times.ttft_from_open_ms - times.ttft_after_finish_ms == pytest.approx(retrieval_ms)
        assert times.ttft_after_finish_ms > 0
    assert run.completion_s >= max(each.finish_s for each in sessions)


@pytest.mark.parametrize("streamed", [True, False])
async def test_death_of_the_engine_ends_the_replay_with_one_error(streamed: bool) -> None:
    engine = FakeEngine()
    engine.die("of the test")
    with pytest.raises(UnavailableError, match="of the test"):
        await replay(engine, trace(SessionMode.APPEND), lambda: None, streamed=streamed)


async def test_refused_input_ends_the_replay_with_its_reason_and_closes_every_session() -> None:
    engine = FakeEngine(max_model_len=64)
    session = TracedSession(0.0, SessionMode.APPEND, (1,), (TimedInput(0.0, (2,) * 80),), (3,))
    with pytest.raises(OutOfRangeError):
        await replay(engine, [session, *trace(SessionMode.APPEND)], lambda: None, streamed=True)
    assert engine.status().load.running_requests == 0


@pytest.mark.parametrize("streamed", [True, False])
async def test_engine_that_never_answers_is_not_waited_for_without_end(streamed: bool) -> None:
    engine = FakeEngine()
    engine.hold_before(0)
    with pytest.raises(UnavailableError, match="had not ended"):
        await replay(engine, trace(SessionMode.APPEND), lambda: None, streamed=streamed, patience_s=0.05)
    assert engine.status().load.running_requests == 0


def times(after_finish_ms: float, swaps: int = 0, recomputes: int = 0, invalidated: int = 0) -> SessionTimes:
    progress = SessionProgress(invalidated_tokens=invalidated)
    return SessionTimes(after_finish_ms + 1000, after_finish_ms, SessionRecord(progress, swaps, recomputes))


def test_comparison_is_with_the_run_that_waited() -> None:
    waited = Replay(tuple(SessionTimes(1000.0 + ms, ms, None) for ms in (100.0, 200.0, 300.0)), 10.0)
    streamed = Replay((times(10.0, swaps=1), times(50.0, recomputes=2), times(100.0, invalidated=7)), 10.2)
    table = compare({"ns": waited, "lcas": streamed})
    assert list(table) == ["ns", "lcas"]
    assert table["ns"]["speedup_vs_ns"] == {"p50": 1.0, "p90": 1.0, "p95": 1.0, "p99": 1.0}
    assert table["ns"]["preemptions"] == {"swap": 0, "recompute": 0}
    lcas = table["lcas"]
    assert lcas["ttft_after_finish_ms"]["p50"] == 50.0
    assert lcas["ttft_from_open_ms"]["p50"] == 1050.0
    assert lcas["speedup_vs_ns"]["p50"] == 4.0
    assert lcas["completion_ratio_vs_ns"] == 1.02
    assert lcas["preemptions"] == {"swap": 1, "recompute": 2}
    assert lcas["tokens_invalidated"] == 7


def test_rounds_count_together() -> None:
    once = Replay((times(10.0, swaps=1),), 10.0)
    both = once.and_also(Replay((times(30.0, swaps=2),), 11.0))
    assert (both.completion_s, [each.ttft_after_finish_ms for each in both.sessions]) == (21.0, [10.0, 30.0])


def test_both_baselines_always_run_first_and_nothing_runs_twice() -> None:
    assert names_of_runs([]) == ["ns", "default_vllm"]
    assert names_of_runs(["lcas", "default_vllm", "lcas"]) == ["ns", "default_vllm", "lcas"]


def test_workload_tells_what_was_asked_of_which_engine() -> None:
    sessions = trace(SessionMode.APPEND)
    told = describe(sessions, RachisConfig())
    assert told["all_prompt_tokens"] == sum(len(each.prompt) for each in sessions)
    assert told["inputs"] == sum(len(each.inputs) for each in sessions)
    assert told["kv_blocks"] == RachisConfig().engine.kv_blocks


async def test_loads_are_shares_of_what_the_engine_was_measured_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set-up has an engine of its own at each load, and prompts that no engine has seen."""
    engines: list[FakeEngine] = []

    @asynccontextmanager
    async def fake(*_: Any) -> AsyncIterator[tuple[FakeEngine, EngineInfo]]:
        engines.append(FakeEngine(max_model_len=512))
        yield engines[-1], EngineInfo("m", "m", 256, 512, 16, 8, "float32")

    # A real engine takes minutes for this.
    monkeypatch.setattr("benchmarks.streaming.in_process_engine", fake)
    drawn: list[WorkloadSpec] = []

    def noted(spec: WorkloadSpec, *sizes: int) -> tuple[TracedSession, ...]:
        drawn.append(spec)
        return draw_trace(spec, *sizes)

    # How fast sessions come shows in no answer.
    monkeypatch.setattr("benchmarks.streaming.draw_trace", noted)
    workload = {"mode": "append", "sessions": 4, "rate_per_s": 2.0, "token_scale": 0.01, "time_scale": 1e-4, "seed": 3}
    arguments = {
        "config": RachisConfig().model_dump(mode="json"), "workload": workload, "policies": ["default"],
        "loads": [0.5, 2.0], "rounds": 2,
    }  # fmt: skip
    heard = HeardReports()
    result = await bench_streaming(arguments, heard)
    capacity_per_s = result["capacity_per_s"]
    assert [row["load"] for row in result["loads"]] == [0.5, 2.0]
    for row in result["loads"]:
        assert row["workload"]["rate_per_s"] == pytest.approx(row["load"] * capacity_per_s, rel=1e-3)
        assert list(row["policies"]) == ["ns", "default_vllm", "default"]
        assert [figures["sessions"] for figures in row["policies"].values()] == [8, 8, 8]
    assert (drawn[0].rate_per_s, drawn[0].time_scale) == (1e6, 0.0), "all at once, and nothing is waited for"
    assert [each.time_scale for each in drawn[1:]] == [1e-4, 1e-4]
    assert len(engines) == 1 + 2 * 2 * 3
    order = [
        name.removeprefix("load 2: ") for name in heard.phases if name.startswith("load 2: ") and "warm" not in name
    ]
    assert order == ["ns", "default_vllm", "default", "default", "default_vllm", "ns"]
    assert heard.steps_done == heard.steps_in_all > 0
    assert heard.phases[1] == "capacity: ns"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--policy", "fcfs,random"], "--policy: must be of default, default_vllm, fcfs, mcps, lcas, got random"),
        (["--preemption", "often"], "streaming.preemption"),
        (["--set", "engine.kv_blocks=1"], "engine.kv_blocks"),
        (["--load", "0.5,much"], "--load"),
    ],
)
def test_bad_option_is_refused_by_name_before_anything_starts(arguments: list[str], named: str) -> None:
    refused = rachis("bench", "streaming", *arguments).exception
    assert isinstance(refused, ConfigError)
    assert named in str(refused)
