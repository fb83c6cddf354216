"""vLLM's CPU worker, with what `kv_transfer.model_runners` mixes into its model runner."""

from vllm.v1.worker.cpu_worker import CPUWorker

from kv_transfer import model_runners


class RachisCPUWorker(CPUWorker):
    """Seeded prompts may be prefilled in chunks; decode workers keep requests that share a prefix side by side.

    V2 of vLLM's model runners draws by position, and has an order of rows of its own.
    """

    def init_device(self) -> None:
        super().init_device()
        if self.use_v2_model_runner:
            return
        model_runners.allow_seeded_chunked_prefill(self.model_runner)
        if (self.vllm_config.additional_config.get("rachis_decode") or {}).get("order_rows"):
            model_runners.keep_shared_prefixes_together(self.model_runner)
