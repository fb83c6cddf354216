"""How many different LoRA adapters a decode batch has: those of all running requests count, scheduled now or not.

vLLM counts those of the running requests that it has just scheduled. With a step in flight it leaves some of them out
where a block is short, and may then admit a request with one adapter too many; the next step schedules all, and ends
with an assertion.
"""

from typing import Any

from decode_worker.running_adapters import RunningAdapters
from kv_transfer.handoff.emitted_output import EmittedOutput
from kv_transfer.vllm_private import adapter_of


class AdapterPlaces(EmittedOutput):
    """Goes right before `Scheduler` or `AsyncScheduler` in the bases."""

    lora_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running_adapters = RunningAdapters()

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Whether it may be admitted now; where not, it waits on."""
        return super()._handle_blocked_waiting_request(request) and self._has_adapter_place(request)

    def _has_adapter_place(self, request: Any) -> bool:
        adapter = adapter_of(request)
        if not adapter or self.lora_config is None:
            return True
        running = self._running_adapters.of(self.running)
        return adapter in running or len(running) < self.lora_config.max_loras
