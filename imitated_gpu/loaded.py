"""What a process has loaded before imitated GPUs are forked from it: vLLM, and all that stands around an engine.

Loading takes several times as long as starting an engine that has no weights.
"""

import gc
import os

from cluster_configs.schema import RachisConfig
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment

_config = RachisConfig.model_validate({
    "model": {"name": "imitated-model"}, "engine": {"device": "imitated", "cost_model": "h100-llama-3.1-8b"},
})  # fmt: skip
# Read when vLLM and torch are loaded; each fork sets its own again before it makes an engine.
os.environ.update(
    engine_environment(EngineSettings(_config.model, _config.engine, _config.handoff, EngineRole.PREFILL))
)

import vllm.v1.engine.llm_engine  # noqa: E402, F401

import worker_runtime.vllm_arguments  # noqa: E402, F401

gc.freeze()
