"""Tiny models with random weights, one of each family that keeps its KV in another way: a literal table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 258
# All bytes, then these two.
_FIRST, _END = 256, 257
# Random weights as they are initialized give every prompt the same likeliest token.
_WEIGHT_SCALE = 4.0
_LAYERS = 4
_WINDOW = 64
_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "bos_token_id": _FIRST, "eos_token_id": _END, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True, slots=True)
class Family:
    """One row. classes: of the model and its configuration in transformers. without: fields of the common shape that
    the configuration does not take. dtype: float32 where vLLM computes the family in it on a CPU. settings: of the
    service. not_shown: what a plain vLLM cannot be compared with, by feature, and why."""

    title: str
    classes: tuple[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    dtype: str = "float32"
    settings: Mapping[str, Any] = field(default_factory=dict)
    not_shown: Mapping[str, str] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama", ("LlamaForCausalLM", "LlamaConfig")),
    "llama_two_ranks": Family(
        "Llama over two ranks (tensor parallel)",
        ("LlamaForCausalLM", "LlamaConfig"),
        settings={"engine.tensor_parallel_size": 2},
    ),
    "qwen3": Family("Qwen3", ("Qwen3ForCausalLM", "Qwen3Config")),
    "qwen3_moe": Family("Qwen3 MoE", ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"), _EXPERTS),
    "gemma3": Family(
        "Gemma 3",
        ("Gemma3ForCausalLM", "Gemma3TextConfig"),
        {
            "sliding_window": _WINDOW,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention"] * (_LAYERS - 1) + ["full_attention"],
        },
    ),
    "gpt_oss": Family(
        "gpt-oss",
        ("GptOssForCausalLM", "GptOssConfig"),
        {
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2),
        },
    ),
    "deepseek_v2": Family(
        "DeepSeek V2 (latent attention)",
        ("DeepseekV2ForCausalLM", "DeepseekV2Config"),
        {
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": _LAYERS,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
        },
        frozenset({"head_dim"}),
        not_shown={
            "decode batches": "vLLM's CPU kernels of latent attention give other log-probabilities (0.1 seen) when "
            "prompts share a step, a plain vLLM's own among them"
        },
    ),
    "qwen3_next": Family(
        "Qwen3-Next (gated delta net)",
        ("Qwen3NextForCausalLM", "Qwen3NextConfig"),
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        dtype="bfloat16",
    ),
    "falcon_h1": Family(
        "Falcon H1 (Mamba 2 beside attention)",
        ("FalconH1ForCausalLM", "FalconH1Config"),
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 64,
        },
    ),
}


def write_model(family: Family, folder: Path) -> None:
    """Weights, the same each time, and a tokenizer whose tokens are bytes."""
    import torch
    import transformers

    torch.manual_seed(0)
    model_class, config_class = (getattr(transformers, name) for name in family.classes)
    shape = {name: value for name, value in _SHAPE.items() if name not in family.without}
    model = model_class(config_class(**{**shape, **family.fields})).to(torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(_WEIGHT_SCALE)
    model.save_pretrained(folder)
    _write_tokenizer(folder, transformers.PreTrainedTokenizerFast)


def _write_tokenizer(folder: Path, kind: Callable[..., Any]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # In order: the alphabet is a set.
    vocabulary = {character: token for token, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": _FIRST, "</s>": _END}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kind(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
