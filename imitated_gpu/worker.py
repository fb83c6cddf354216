"""A worker of vLLM's over an imitated GPU: no model, no weights; steps take their modelled time, tokens are arbitrary.

`worker_runtime.vllm_arguments` gives it to the engine by its name. It lives in the engine's process and sees the
scheduler's requests: what a model runner would keep of them is read there. What a step takes is what the simulator
says it takes, by the same module.
"""

import time
from typing import Any

import torch
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.forward_context import set_forward_context
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from cluster_core.clock import monotonic_s
from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings
from cluster_sim.engines.vllm_steps import StepBegin, StepModel
from imitated_gpu.answers import Answers, answer_tokens
from imitated_gpu.kv_memory import blocks_without_memory
from imitated_gpu.pace import Pace
from imitated_gpu.settings import ImitationSettings

_LAYER = "imitated"
# The layout that vLLM's CPU build takes.
_LAYOUT = "LBHNC"


class ImitatedWorker(WorkerBase):
    """See the module. `watch` once, before the first step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = ImitationSettings.of(self.vllm_config)
        self._pace = Pace()
        # By request: of the tokens of its answer.
        self._seeds: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self._steps: StepModel | None = None
        tokenizer = cached_tokenizer_from_config(self.model_config)
        special = {*tokenizer.all_special_ids, *_ends(self.model_config.hf_config.eos_token_id)}
        vocabulary = self.model_config.get_vocab_size()
        self._answers = Answers(answer_tokens(vocabulary, special, lambda token: tokenizer.decode([token])))

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """There is none."""

    def watch(self, scheduler: Any) -> None:
        """scheduler: of the engine, whose requests are looked at in each step."""
        self._requests = scheduler.requests
        block_tokens = self.cache_config.block_size
        settings = VllmEngineSettings(
            SchedulerKind.PLAIN, block_tokens, scheduler.kv_cache_config.num_blocks, leaps=False
        )
        self._steps = StepModel(self._settings.costs, settings, scheduler)

    # Memory.

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One layer whose blocks have the bytes of all layers."""
        half = -(-self._settings.costs.kv_bytes_per_token // 2)
        block_tokens = self.cache_config.block_size
        return {_LAYER: FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=half, dtype=torch.int8)}

    def determine_available_memory(self) -> int:
        return self._settings.costs.device_tokens * self._settings.costs.kv_bytes_per_token

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [_LAYOUT]

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        if has_kv_transfer_group():
            page_bytes = self.get_kv_cache_spec()[_LAYER].page_size_bytes
            blocks = blocks_without_memory(kv_cache_config.num_blocks, page_bytes)
            get_kv_transfer_group().register_kv_caches({_LAYER: blocks})

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        return {(0, 0): get_kv_transfer_group().get_handshake_metadata()} if has_kv_transfer_group() else None

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    # Steps.

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        for name in scheduler_output.finished_req_ids:
            self._forget(name)
        for name in scheduler_output.preempted_req_ids or ():
            self._forget(name)
        if has_kv_transfer_group():
            connector = get_kv_transfer_group()
            connector.handle_preemptions(scheduler_output.kv_connector_metadata)
            # As on a GPU, the forward pass has only been launched when pulls begin and are asked for.
            with (
                set_forward_context(None, self.vllm_config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduler_output) as transfers,
            ):
                copies_s = connector.host_link.take_waited_s()
        else:
            transfers, copies_s = None, 0.0
        self._take_a_step(scheduler_output, copies_s)
        return self._computed(scheduler_output, transfers)

    def _take_a_step(self, output: SchedulerOutput, copies_s: float) -> None:
        """Returns when it is over."""
        assert self._steps is not None, "watch comes first"
        if not output.total_num_scheduled_tokens:
            return
        step_s = self._steps.steps_of(output, StepBegin(0.0, copies_s, 1.0, 0)).end_s
        now_s = monotonic_s()
        ends_s = self._pace.ends_s(output.num_scheduled_tokens.keys(), step_s, now_s)
        if ends_s > now_s:
            time.sleep(ends_s - now_s)

    def _computed(self, output: SchedulerOutput, transfers: KVConnectorOutput | None) -> ModelRunnerOutput:
        if not output.total_num_scheduled_tokens:
            return ModelRunnerOutput.with_kv_conn_output_only(transfers)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[self._sampled(name) for name in names],
            kv_connector_output=transfers,
        )

    def _sampled(self, name: str) -> list[int]:
        request = self._requests.get(name)
        if request is None or request.is_prefill_chunk:
            return []
        seed = self._seeds.get(name)
        if seed is None:
            prompt = request.prompt_token_ids
            seed = self._seeds[name] = self._answers.seed_of(prompt, request.sampling_params.seed)
        return [self._answers.token(seed, request.num_tokens)]

    def _forget(self, name: str) -> None:
        self._seeds.pop(name, None)
        if self._steps is not None:
            self._steps.readers.leave(name)

    def shutdown(self) -> None:
        ensure_kv_transfer_shutdown()


def _ends(token_ids: int | list[int] | None) -> list[int]:
    return [token_ids] if isinstance(token_ids, int) else token_ids or []
