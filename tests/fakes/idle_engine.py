"""An idle engine with nothing in it, over no vLLM: what callers get when it dies, hangs, or its process does."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from cluster_core.clock import ClusterClock, monotonic_s
from cluster_core.engine_reports import EngineInfo, HotPrefix
from worker_runtime.engine_child import main
from worker_runtime.engine_settings import EngineSettings
from worker_runtime.engine_work import EngineWork

INFO = EngineInfo("m", "m", 256, 128, 16, 8, "float32")
# What it is told by, as so many prefixes that are asked for.
DIE, HANG, FORK, LOG, COPY, TIME = range(1001, 1007)
# How long a fork lives.
_FORK_S = 20.0
# Of the model in the settings: it does not start.
NO_MODEL = "no-model"


class IdleWork(EngineWork):
    """Its next step raises when it is told to die."""

    dies = False
    copies = False

    def __init__(self, engine: Any, info: EngineInfo, settings: EngineSettings, clock: ClusterClock, on_loop: Any):
        super().__init__(engine, info, settings, clock, on_loop)
        self._clock = clock

    def has_requests(self) -> bool:
        if self.dies:
            raise ZeroDivisionError("of a test")
        return self.copies

    def step(self) -> None:
        """Of an engine at rest: for copies alone."""

    def copying_since_s(self) -> float | None:
        """A copy that began a minute ago does not end."""
        return monotonic_s() - 60.0 if self.copies else None

    def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        self.dies |= at_most == DIE
        self.copies |= at_most == COPY
        if at_most == TIME:
            return [HotPrefix(str(self._clock.unix_ms()), 0, 0, 0, 0, 0.0)]
        while at_most == HANG:
            time.sleep(1)
        if at_most == FORK and not os.fork():
            logging.getLogger("kv_transfer").warning("a rank of the engine")
            time.sleep(_FORK_S)
            os._exit(0)
        if at_most == LOG:
            for name in ("worker_runtime", "a_library"):
                logging.getLogger(name).info("of %s", name, extra={"request_id": "r-1", "lock": threading.Lock()})
        return super().hottest_prefixes(at_most)


def idle_vllm() -> Any:
    """As much of an `LLMEngine` as an engine at rest is asked for."""
    pool = SimpleNamespace(get_num_free_blocks=lambda: 9, num_gpu_blocks=10)
    scheduler = SimpleNamespace(
        requests={},
        running=[],
        waiting=[],
        kv_holding_waiting=[],
        num_waiting_for_streaming_input=0,
        connector=None,
        kv_cache_manager=SimpleNamespace(block_pool=pool),
        kv_cache_config=SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=160)], num_blocks=10),
    )
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler), shutdown=lambda: None)
    parallel = SimpleNamespace(tensor_parallel_size=1)
    return SimpleNamespace(engine_core=core, vllm_config=SimpleNamespace(parallel_config=parallel))


def bring_up(
    settings: EngineSettings, clock: ClusterClock, on_phase: Callable[[str], None], on_loop: Callable[..., object]
) -> EngineWork:
    on_phase("resting")
    if settings.model.name == NO_MODEL:
        raise ValueError("no model")
    return IdleWork(idle_vllm(), INFO, settings, clock, on_loop)


if __name__ == "__main__":
    main(bring_up)
