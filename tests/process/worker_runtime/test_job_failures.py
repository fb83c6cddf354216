"""What taking in one job raises, or another first token than was replayed, ends that job and not the engine."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster_configs.schema import EngineSection, HandoffSection, ModelSection
from cluster_core.clock import ClusterClock
from cluster_core.engine_jobs import EngineJob, EngineOutput, SamplingSpec
from cluster_core.errors import JobFailedError, UnavailableError
from worker_runtime.engine_figures import EngineFigures
from worker_runtime.engine_sessions import SessionPrompt
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.job_stream import JobStream
from worker_runtime.running_jobs import RunningJobs
from worker_runtime.step_costs import StepCosts

pytestmark = pytest.mark.integration

SAMPLING = SamplingSpec(max_tokens=4, temperature=0.0)


class Engine:
    """Of vLLM's, what jobs go through; `raises` is what it makes of the next one."""

    def __init__(self) -> None:
        self.raises: Exception | None = None
        self.aborted: list[str] = []
        self.outputs: list[Any] = []

    def add_request(self, request_id: str, *_: Any, **__: Any) -> str:
        if self.raises is not None:
            raise self.raises
        return f"{request_id}-internal"

    def abort_request(self, names: list[str], *, internal: bool) -> None:
        self.aborted += names

    def step(self) -> list[Any]:
        outputs, self.outputs = self.outputs, []
        return outputs


class World:
    def __init__(self) -> None:
        self.engine = Engine()
        settings = EngineSettings(ModelSection(), EngineSection(), HandoffSection(), EngineRole.DECODE)
        figures = SimpleNamespace(
            counters=SimpleNamespace(prompt_tokens=0, requests=0, generated_tokens=0),
            costs=StepCosts(),
            block_size=32,
            missing_features={},
        )
        self.jobs = RunningJobs(
            self.engine, settings, ClusterClock(), cast(EngineFigures, figures), lambda call, *args: call(*args)
        )

    def add(self, name: str, **fields: Any) -> "asyncio.Queue[EngineOutput | Exception]":
        """What comes of it."""
        items: asyncio.Queue[EngineOutput | Exception] = asyncio.Queue()
        self.jobs.add(JobStream(EngineJob(name, (1, 2, 3), SAMPLING, **fields), items))
        return items

    def sampled(self, name: str, token: int) -> None:
        completion = SimpleNamespace(token_ids=[token], text="x", logprobs=None, finish_reason=None)
        self.engine.outputs.append(
            SimpleNamespace(request_id=name, outputs=[completion], metrics=None, num_cached_tokens=0)
        )


@pytest.mark.parametrize("error", [KeyError("a defect"), AssertionError("a defect"), RuntimeError("a defect")])
def test_whatever_taking_in_a_job_raises_is_that_job_s_end(error: Exception) -> None:
    world = World()
    world.engine.raises = error
    failed = world.add("a")
    assert isinstance(failed.get_nowait(), JobFailedError)

    world.engine.raises = None
    assert world.add("b").empty()
    assert world.add("a").empty(), "its name is free again"
    assert world.jobs.dead is None


def test_a_session_that_vllm_ends_with_an_error_leaves_no_record_behind() -> None:
    """As where its grammar does not take what was sampled."""
    world, taken = World(), list[str]()
    items: asyncio.Queue[EngineOutput | Exception] = asyncio.Queue()
    stream = JobStream(EngineJob("a", (1, 2, 3), SAMPLING), items)
    world.jobs.add(stream)
    # Of a session's prompt, which is made in a real scheduler.
    stream.prompt = cast(SessionPrompt, SimpleNamespace(take_record=lambda: taken.append("a")))
    completion = SimpleNamespace(token_ids=[7], text="x", logprobs=None, finish_reason="error")
    world.engine.outputs.append(SimpleNamespace(request_id="a", outputs=[completion]))

    (made,) = world.jobs.step(counts_prefixes=False)
    assert made[0] is stream and isinstance(made[1], UnavailableError)
    assert taken == ["a"]
