"""Brings one vLLM engine up by its settings: the right version, the model, a warm-up, and what works with it."""

import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from cluster_core.clock import ClusterClock
from cluster_core.engine_jobs import EngineJob, SamplingSpec
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import StartError
from kv_transfer import vllm_private
from kv_transfer.between_steps import look_before_steps
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.engine_work import EngineWork
from worker_runtime.gloo_device import one_gloo_device

logger = logging.getLogger(__name__)

_WARM_UP = (
    SamplingSpec(max_tokens=2, temperature=0.0),
    SamplingSpec(max_tokens=2, seed=0, top_p=0.9, top_k=4, min_p=0.1, frequency_penalty=0.1, logprobs=1),
)


def bring_up_vllm(
    settings: EngineSettings, clock: ClusterClock, on_phase: Callable[[str], None], on_loop: Callable[..., object]
) -> EngineWork:
    """On the thread that will step it. Raises StartError for another vLLM than ours, else whatever vLLM raises."""
    on_phase("importing vLLM")
    with _no_garbage():
        from vllm import __version__ as version
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.engine.llm_engine import LLMEngine

        from kv_transfer.handoff.emitted_output import accept_emitted_rows
        from worker_runtime.vllm_arguments import engine_args, engine_info

    if version != vllm_private.SUPPORTED_VLLM:
        raise StartError(f"vLLM {version} is installed, Rachis works with {vllm_private.SUPPORTED_VLLM}")
    if settings.engine.model_runner == "v2" and not HAS_TRITON:
        raise StartError(
            "v2 is written in Triton, of which vLLM finds none for this device", field="engine.model_runner"
        )
    is_imitated = settings.engine.device == "imitated"
    if is_imitated:
        _check_platform()
    if settings.lora.max_loaded and settings.engine.device == "cpu":
        from worker_runtime import cpu_lora

        cpu_lora.mend()
    on_phase("imitating the model" if is_imitated else "loading the model")
    # Ranks in processes of their own have groups of their own, and a fork has no thread of its parent.
    shared = one_gloo_device() if settings.engine.tensor_parallel_size == 1 else nullcontext()
    with own_cores(), shared, _no_garbage():
        engine = LLMEngine.from_engine_args(engine_args(settings))
    if is_imitated:
        engine.collective_rpc("watch", args=(vllm_private.scheduler_of(engine),))
    elif settings.role is not EngineRole.ALONE:
        engine.collective_rpc(accept_emitted_rows)
    look_before_steps(engine)
    info = engine_info(engine, settings)
    if settings.role is not EngineRole.ALONE:
        _check_model(engine, info)
    on_phase("warming up")
    # The other one is for the sampler, which an imitation has not.
    _warm_up(engine, _WARM_UP[:1] if is_imitated else _WARM_UP)
    work = EngineWork(engine, info, settings, clock, on_loop)
    work.claims.start()
    work.publish_status()
    return work


def _check_model(engine: Any, info: EngineInfo) -> None:
    """Says what the model cannot have. Raises StartError where a prefill worker would not compute whole prompts."""
    if vllm_private.prompt_tokens_left_out(vllm_private.connector_of(engine)):
        raise StartError(
            "vLLM's NIXL connector leaves the last tokens of this model's prompts to the decode side, as it does where "
            "layers keep a state (Mamba, gated delta nets): the first token of a prefill worker would be another one",
            field="model.path",
        )
    for feature, reason in info.missing_features.items():
        logger.warning("no %s: %s", feature, reason)


@contextmanager
def own_cores() -> Iterator[None]:
    """This thread may run where it could before. Without a GPU, vLLM's NIXL connector binds the thread that makes it to
    the last core, for its copies: here that thread computes, and all engines of a machine would share one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """What is made here is kept for good, and is never looked at by the collector: neither meanwhile, again and again,
    nor by vLLM, which collects several times while it loads a model. A quarter of the CPU time of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _check_platform() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise StartError(
            "imitated needs Rachis as it is installed for CPUs (`make setup PROFILE=cpu`)", field="engine.device"
        )


def _warm_up(engine: Any, samplings: Sequence[SamplingSpec]) -> None:
    """Greedy and sampled tokens before anybody waits for them: what vLLM imports and allocates on first use."""
    from worker_runtime.vllm_conversion import prompt_of, sampling_params

    for index, sampling in enumerate(samplings):
        job = EngineJob(f"warm-up-{index}", (0,), sampling)
        engine.add_request(job.request_id, prompt_of(job), sampling_params(job))
    while engine.has_unfinished_requests():
        engine.step()
