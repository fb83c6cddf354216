"""What vLLM calls in each process before it makes an engine."""

import os
from typing import Any

import numpy as np

# Its steps are one after the other on any device.
_IMITATED = "imitated_gpu.worker.ImitatedWorker"


def register() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        _replace_kernels()
    if os.environ.get("TESTS_VARIANT", "").endswith("async"):
        _schedule_asynchronously()


def _schedule_asynchronously() -> None:
    from vllm.platforms.cpu import CpuPlatform

    switched_off = CpuPlatform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        switched_off(config)
        if config.parallel_config.worker_cls == _IMITATED:
            return
        scheduler = config.scheduler_config
        scheduler.async_scheduling = True
        if scheduler.scheduler_cls is not None:
            # As `worker_runtime.vllm_arguments` names them.
            module, _, name = scheduler.scheduler_cls.rpartition(".")
            scheduler.scheduler_cls = f"{module}.Async{name}"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def _replace_kernels() -> None:
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample.ops import topk_topp_sampler

    # Its loops over rows give integers of Python's own where the kernel of top-k and top-p wants Triton's.
    topk_topp_sampler.HAS_TRITON = False
    # It makes integers of comparisons that are reshaped, and takes no mask but of booleans.
    register_kernels({
        "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel": _apply_grammar_bitmask,
    })  # fmt: skip


def _apply_grammar_bitmask(
    logits: Any,
    logits_stride: int,
    logits_indices: Any,
    cu_num_logits: Any,
    bitmask: Any,
    bitmask_stride: int,
    vocab_size: int,
    **constants: int,
) -> None:
    """Tokens whose bit is not set get minus infinity, in the row of each request and position."""
    firsts = cu_num_logits.tolist()
    for packed, mapped in zip(bitmask.numpy(), logits_indices.tolist(), strict=True):
        request, position = divmod(mapped, constants["MASK_STRIDE"])
        row = firsts[request] + position
        if row < firsts[request + 1]:
            allowed = np.unpackbits(packed.view(np.uint8), count=vocab_size, bitorder="little")
            logits[row, np.flatnonzero(allowed == 0)] = -float("inf")
