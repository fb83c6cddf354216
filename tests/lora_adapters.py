"""LoRA adapters for tests: random weights over the built-in model, as PEFT writes them, that change what it says."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_HIDDEN, _HEADS, _INNER, _LAYERS = 128, 256, 256, 2
# Of each layer: what goes in, and what comes out.
_MODULES = {
    "self_attn.q_proj": (_HIDDEN, _HEADS),
    "self_attn.v_proj": (_HIDDEN, _HEADS),
    "mlp.down_proj": (_INNER, _HIDDEN),
}


def write_adapter(folder: Path, seed: int, *, rank: int = 4, scale: float = 0.7, width: int = 1) -> str:
    """Returns its path. width: in times of the model's own."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    weights = {}
    for layer in range(_LAYERS):
        for module, (width_in, width_out) in _MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            width_in, width_out = width * width_in, width * width_out
            inner, outer = rng.standard_normal((rank, width_in)), rng.standard_normal((width_out, rank))
            weights[f"{name}.lora_A.weight"] = (inner * scale / width_in**0.5).astype(np.float32)
            weights[f"{name}.lora_B.weight"] = (outer * scale).astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": sorted(module.split(".")[1] for module in _MODULES),
        "base_model_name_or_path": "rachis-builtin",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
