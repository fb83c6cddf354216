"""vLLM's CPU worker, with seeded prompts that may be prefilled in chunks (`kv_transfer.vllm_private`)."""

from vllm.v1.worker.cpu_worker import CPUWorker

from kv_transfer import vllm_private


class RachisCPUWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        vllm_private.allow_seeded_chunked_prefill(self.model_runner)
