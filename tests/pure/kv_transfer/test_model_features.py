"""What a model's KV rules out, each with the reason; and nothing of one whose layers all have full attention."""

from dataclasses import replace

import pytest

from kv_transfer.model_features import Feature, KvLayout, allows, missing_features

PLAIN = KvLayout(
    ("FullAttention",), is_one_list=True, has_full_attention=True, keeps_prefixes=True, computes_in_pieces=True
)
SLIDING = replace(PLAIN, kinds=("SlidingWindow", "SlidingWindow", "FullAttention"), is_one_list=False)
STATES = replace(PLAIN, kinds=("Mamba",), is_one_list=False, has_full_attention=False)
LATENT_ON_A_CPU = replace(PLAIN, kinds=("MLAAttention",), keeps_prefixes=False, computes_in_pieces=False)
LIST = "this model's KV is not one list of blocks (2 SlidingWindow and 1 FullAttention)"


def test_a_model_with_full_attention_everywhere_has_all() -> None:
    assert missing_features(PLAIN) == {}


def test_sliding_windows_rule_out_what_cuts_off_keeps_or_copies_lists_of_blocks() -> None:
    assert missing_features(SLIDING) == dict.fromkeys(
        ("tiers", "sessions", "decode batches", "hand-over", "content check"), LIST
    )


def test_the_index_needs_one_group_of_layers_whose_blocks_stand_for_whole_prefixes() -> None:
    assert missing_features(STATES)["prefix index"] == "none of this model's layers has full attention (1 Mamba)"
    assert allows(SLIDING, Feature.PREFIX_INDEX)


def test_prompts_that_are_computed_in_one_piece_cannot_grow() -> None:
    missing = missing_features(LATENT_ON_A_CPU)
    assert missing["sessions"] == "vLLM computes this model's prompts in one piece on this device"
    assert missing["tiers"] == missing["prefix cache"] == "vLLM keeps no prefixes of this model on this device"
    assert "decode batches" not in missing


@pytest.mark.parametrize("layout", [PLAIN, SLIDING, STATES, LATENT_ON_A_CPU], ids=lambda layout: layout.kinds[0])
def test_what_is_missing_is_what_is_not_allowed(layout: KvLayout) -> None:
    assert set(missing_features(layout)) == {feature for feature in Feature if not allows(layout, feature)}
