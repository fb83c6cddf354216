"""vLLM's CPU worker, with what `kv_transfer.vllm_private` mixes into its model runner."""

from vllm.v1.worker.cpu_worker import CPUWorker

from kv_transfer import vllm_private


class RachisCPUWorker(CPUWorker):
    """Seeded prompts may be prefilled in chunks; decode workers keep requests that share a prefix side by side."""

    def init_device(self) -> None:
        super().init_device()
        vllm_private.allow_seeded_chunked_prefill(self.model_runner)
        if (self.vllm_config.additional_config.get("rachis_decode") or {}).get("order_rows"):
            vllm_private.keep_shared_prefixes_together(self.model_runner)
