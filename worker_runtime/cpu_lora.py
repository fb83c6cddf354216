"""vLLM's LoRA on a CPU, mended: a request of the model alone is computed beside those of adapters as it is alone.

A token without an adapter has the index -1. vLLM's kernels on a GPU skip it; the operations that it has for CPUs take
the weights of the last place for it (vllm#48421, #49656: open). What goes into them is zero for such a token here, and
so is what comes out.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

_OPERATIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
_NO_ADAPTER = -1


def mend() -> None:
    """Before an engine is made. Harmless again."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in _OPERATIONS:
        operation = getattr(lora_ops, name)
        if not hasattr(operation, "__wrapped__"):
            # Those for prompts call these by the module's own names.
            mended = _skips_what_has_none(operation)
            setattr(lora_ops, name, mended)
            setattr(punica_cpu, name, mended)


def _skips_what_has_none(operation: Callable[..., None]) -> Callable[..., None]:
    @wraps(operation)
    def mended(inputs: Any, weights: Any, output: Any, indices: Any, *rest: Any, **named: Any) -> None:
        has_none = indices == _NO_ADAPTER
        if has_none.any():
            inputs = inputs.masked_fill(has_none.unsqueeze(1), 0)
        operation(inputs, weights, output, indices, *rest, **named)

    return mended
