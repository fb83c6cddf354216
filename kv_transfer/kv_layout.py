"""How an engine keeps its KV, read off its configuration: what `kv_transfer.model_features` asks for."""

from typing import Any

from kv_transfer.model_features import KvLayout


def layout_of(vllm_config: Any, kv_cache_config: Any) -> KvLayout:
    """Of an engine with these, which are vLLM's own."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    have_full = [isinstance(spec, FullAttentionSpec) for spec in specs]
    return KvLayout(
        kinds=tuple(type(spec).__name__.removesuffix("Spec") for spec in specs),
        is_one_list=have_full == [True],
        has_full_attention=any(have_full),
        keeps_prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
        computes_in_pieces=bool(vllm_config.scheduler_config.enable_chunked_prefill),
    )
