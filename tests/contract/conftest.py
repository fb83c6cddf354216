"""The engines that the contract is asked of, shared by all modules here, and what the tests ask them with."""

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable

import pytest

from cluster_configs.schema import LoraSection, ObjectivesSection, RachisConfig
from cluster_core.clock import ClusterClock
from cluster_core.engine import Engine
from cluster_core.engine_jobs import Adapter, EmittedTokens, EngineJob, EngineOutput, SamplingSpec
from cluster_core.engine_reports import EngineInfo, EngineLoad
from fault_sim.blocks.engine import BlockEngine
from fault_sim.blocks.fabric import BlockEngineSettings, Fabric
from fault_sim.network import Network
from tests.fakes.engine import FakeEngine, fabric
from tests.lora_adapters import write_adapter
from worker_runtime.engine_process import EngineProcess
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment
from worker_runtime.vllm_engine import VllmEngine

PROMPT = tuple(b"The capital of France is Paris, and the capital of Italy is Rome, and so on and so forth. ")
_names = itertools.count()


_VLLM = [pytest.param(name, marks=pytest.mark.integration) for name in ("vllm", "shared", "imitated", "apart")]


@pytest.fixture(scope="module", params=["fake", "blocks", *_VLLM])
async def started(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Engine, EngineInfo]]:
    """Stopped before the next module starts: vLLM has one engine a process at a time."""
    engine: Engine
    match request.param:
        case "fake":
            engine = FakeEngine(fabric_of_it=_with_adapters(fabric()))
        case "blocks":
            engine = block_engine()
        case "imitated":
            engine = imitated_engine(EngineRole.PREFILL)
        case "shared":
            engine = vllm_engine(EngineRole.SHARED, ObjectivesSection(tpot_s=0.02))
        case "apart":
            engine = vllm_engine(EngineRole.PREFILL, in_a_process=True)
        case _:
            engine = vllm_engine(EngineRole.PREFILL)
    deaths: list[str] = []
    info = await engine.start(lambda phase: None, deaths.append)
    yield engine, info
    await engine.stop()
    assert deaths == []


@pytest.fixture
def computes(started: tuple[Engine, EngineInfo]) -> None:
    """For tests of what only an engine has that computes: the others are left out."""
    if started[1].imitates:
        pytest.skip("an imitated GPU computes nothing")


@pytest.fixture
def likeliest(started: tuple[Engine, EngineInfo]) -> int | None:
    """Log-probabilities to ask for where a test is about something else; None: the engine has none."""
    return None if started[1].imitates else 2


@pytest.fixture
async def engine(started: tuple[Engine, EngineInfo]) -> AsyncIterator[Engine]:
    """The engine, which every test leaves without jobs, leases and blocks in use."""
    yield started[0]
    await until(started[0], is_idle)


def block_engine() -> Engine:
    """Steps of it take next to no time."""
    settings = BlockEngineSettings(blocks=2048, step_s=1e-5, token_s=1e-7)
    return BlockEngine("alone", "alone", _with_adapters(Fabric(Network(random.Random(0)))), settings)


def _with_adapters(made: Fabric) -> Fabric:
    made.adapters.update({f"/adapters/{number}": f"digest-{number}" for number in range(4)})
    return made


@pytest.fixture(scope="module")
def adapters(started: tuple[Engine, EngineInfo], tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    """More than the engine has places for; what they hold is not known yet."""
    if isinstance(started[0], BlockEngine):
        return [Adapter(f"a{number}", f"/adapters/{number}") for number in range(4)]
    folder = tmp_path_factory.mktemp("adapters")
    return [Adapter(f"a{number}", write_adapter(folder / str(number), number)) for number in range(4)]


@pytest.fixture(scope="module")
def broken_adapter(started: tuple[Engine, EngineInfo], tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """Of another model: vLLM finds out when it has a place already."""
    if isinstance(started[0], BlockEngine):
        return Adapter("broken", "/adapters/none")
    return Adapter("broken", write_adapter(tmp_path_factory.mktemp("broken") / "adapter", 7, width=2))


def vllm_engine(
    role: EngineRole, objectives: ObjectivesSection | None = None, *, in_a_process: bool = False
) -> VllmEngine:
    """in_a_process: of its own."""
    config = RachisConfig()
    lora = LoraSection(max_loaded=2, max_in_batch=1)
    told = objectives or config.objectives
    settings = EngineSettings(config.model, config.engine, config.handoff, role, lora=lora, objectives=told)
    os.environ.update(engine_environment(settings))
    return VllmEngine(settings, core=EngineProcess(settings, ClusterClock()) if in_a_process else None)


def imitated_engine(role: EngineRole) -> Engine:
    """vLLM over a GPU that computes nothing."""
    config = RachisConfig.model_validate({
        "model": {"name": "imitated-model"}, "engine": {"device": "imitated", "cost_model": "h100-llama-3.1-8b"},
    })  # fmt: skip
    settings = EngineSettings(config.model, config.engine, config.handoff, role)
    os.environ.update(engine_environment(settings))
    return VllmEngine(settings)


def make_job(
    max_tokens: int = 8,
    *,
    prompt: tuple[int, ...] = PROMPT,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    hand_off: bool = False,
    emitted: EmittedTokens | None = None,
) -> EngineJob:
    sampling = SamplingSpec(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        stop=stop,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return EngineJob(f"job-{next(_names)}", prompt, sampling, hand_off=hand_off, emitted=emitted)


async def outputs_of(engine: Engine, job: EngineJob) -> list[EngineOutput]:
    return [output async for output in engine.generate(job)]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text_of(outputs: list[EngineOutput]) -> str:
    return "".join(output.text for output in outputs)


def is_idle(load: EngineLoad) -> bool:
    jobs = load.running_requests + load.waiting_requests + load.leased_handoffs
    return jobs == 0 and load.free_blocks == load.total_blocks


async def until(engine: Engine, holds: Callable[[EngineLoad], bool]) -> None:
    """Waits until the engine's load is as described; each look follows round trips through the engine.

    An engine publishes its load after it has obeyed, so what one round trip shows may still be old.
    """
    async with asyncio.timeout(60):
        while True:
            for _ in range(3):
                await engine.release("nothing")
            if holds(engine.status().load):
                return
