"""What a process has loaded before an engine starts in it; see `tests.engine_process`, whose server imports this."""

import gc
import os

from cluster_configs.schema import RachisConfig
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment

_config = RachisConfig()
# Read when vLLM, torch and NIXL are loaded; each process sets its own again before it makes an engine.
os.environ.update(
    engine_environment(EngineSettings(_config.model, _config.engine, _config.handoff, EngineRole.PREFILL))
)

import vllm.v1.engine.llm_engine  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

import worker_runtime.vllm_arguments  # noqa: E402, F401

if current_platform.is_cpu():
    import vllm.v1.worker.cpu_worker  # noqa: F401

gc.freeze()
