"""vLLM's LoRA operations for CPUs, and what is mended of them."""

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from worker_runtime import cpu_lora

pytestmark = pytest.mark.integration

# Of three tokens the second has no adapter; there are two places.
INDICES = torch.tensor([0, -1, 1])
INPUTS, SHRINKS, EXPANDS = torch.rand(3, 8) + 1, torch.rand(2, 1, 4, 8) + 1, torch.rand(2, 1, 8, 4) + 1


def computed(operations: dict[str, object]) -> torch.Tensor:
    """What is added to each token's output, of ones."""
    inner, output = torch.zeros(3, 4), torch.ones(3, 8)
    shrink, expand, expand_slice = (operations[name] for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"))
    shrink(INPUTS, SHRINKS, inner, INDICES, 2.0)  # type: ignore[operator]
    expand(inner, EXPANDS, output, INDICES, True)  # type: ignore[operator]
    expand_slice(inner, EXPANDS, output, INDICES, 0, 8, True)  # type: ignore[operator]
    return output - 1


def test_a_token_without_an_adapter_gets_nothing_of_one() -> None:
    cpu_lora.mend()
    cpu_lora.mend()
    names = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
    for module in (lora_ops, punica_cpu):
        added = computed({name: getattr(module, name) for name in names})
        assert (added[1] == 0).all()
        assert (added[[0, 2]] > 0).all()
    plain = computed({name: getattr(lora_ops, name).__wrapped__ for name in names})
    assert torch.equal(plain[[0, 2]], added[[0, 2]]), "tokens of adapters are computed as ever"
    assert (plain[1] > 0).all(), "vLLM does it right by now: worker_runtime.cpu_lora can go"
