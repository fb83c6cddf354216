"""Initial weights that already hint at recall, so that training takes minutes on two cores rather than hours.

Recall needs two steps that gradient descent finds only slowly together, so both are laid out before training:

1. Layer 0 looks back: three heads attend 1, 2 and 3 tokens before themselves (by their query and key biases,
   which RoPE turns into a peak at one distance) and write the key found there into a slot of its own.
2. Layer 1 matches: a question has its key 1 token back (`k17=`) or 3 back (`k17</s><|assistant|>`), a stated value
   has its key 2 back (`k17=blue`). Queries read slots 1 and 3, keys read slot 2, in the slow rotations of RoPE
   only, so that distance matters little; what is found is written out as it was read.

Everything is trained afterwards; the heads not named here start at random.
After "In-context Learning and Induction Heads" (Olsson et al., 2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from builtin_model.vocabulary import FIRST_KEY_ID, FIRST_VALUE_ID

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

SLOT_WIDTH = 24
DISTANCES = (1, 2, 3)
QUESTION_DISTANCES = (1, 3)
VALUE_DISTANCE = 2
MATCHING_HEADS = 2
# Found by trying a few: with these, two thirds of a question's attention in layer 1 falls on the right value
# before any training, over contexts of 128 tokens.
LOOK_BACK_STRENGTH = 6.0
SLOT_STRENGTH = 0.6
QUIET = 0.1
MATCH_STRENGTH = 2.0


def lay_out_recall(model: LlamaForCausalLM) -> None:
    """Change the initial weights in place."""
    with torch.no_grad():
        _mark_keys(model)
        for head, distance in enumerate(DISTANCES):
            _look_back(model, head, distance)
        for head in range(MATCHING_HEADS):
            _match(model, head)
        attention = model.model.layers[1].self_attn
        attention.o_proj.weight.copy_(attention.v_proj.weight.T)


def _slot(distance: int) -> slice:
    """The hidden dimensions that hold the key found `distance` back; the first ones hold the token's own key."""
    return slice(SLOT_WIDTH * distance, SLOT_WIDTH * (distance + 1))


def _mark_keys(model: LlamaForCausalLM) -> None:
    """Let only keys have anything in the first slot, so that nothing else is looked up."""
    embedding = model.model.embed_tokens.weight
    embedding[:FIRST_KEY_ID, _slot(0)] = 0
    embedding[FIRST_VALUE_ID:, _slot(0)] = 0
    embedding[FIRST_KEY_ID:FIRST_VALUE_ID, _slot(0)] *= 2
    # The other slots are to hold what looking back finds, so little else is put there.
    embedding[:, _slot(DISTANCES[0]).start : _slot(DISTANCES[-1]).stop] *= QUIET


def _look_back(model: LlamaForCausalLM, head: int, distance: int) -> None:
    """Let a head of layer 0 attend `distance` tokens back and copy the first slot from there."""
    attention = model.model.layers[0].self_attn
    rows = _rows(model, head)
    frequencies = model.model.rotary_emb.inv_freq
    angles = frequencies * distance
    attention.q_proj.weight[rows] *= 0.1
    attention.k_proj.weight[rows] *= 0.1
    attention.k_proj.bias[rows] = LOOK_BACK_STRENGTH * torch.cat([torch.ones_like(angles), torch.zeros_like(angles)])
    attention.q_proj.bias[rows] = LOOK_BACK_STRENGTH * torch.cat([angles.cos(), -angles.sin()])
    into = range(rows.start, rows.start + SLOT_WIDTH)
    attention.v_proj.weight[rows] = 0
    attention.o_proj.weight[:, rows] = 0
    attention.v_proj.weight[into, range(SLOT_WIDTH)] = 1
    slot = _slot(distance)
    attention.o_proj.weight[range(slot.start, slot.stop), into] = SLOT_STRENGTH


def _match(model: LlamaForCausalLM, head: int) -> None:
    """Let a head of layer 1 attend from a question to where its key was stated with a value."""
    attention = model.model.layers[1].self_attn
    rows = _rows(model, head)
    half = (rows.stop - rows.start) // 2
    pairs = SLOT_WIDTH // 2
    # RoPE turns dimension i together with i + half; the last pairs turn slowest.
    slow = [*range(rows.start + half - pairs, rows.start + half), *range(rows.stop - pairs, rows.stop)]
    attention.q_proj.weight[rows] *= 0.1
    attention.k_proj.weight[rows] *= 0.1
    for distance in QUESTION_DISTANCES:
        slot = _slot(distance)
        attention.q_proj.weight[slow, range(slot.start, slot.stop)] = MATCH_STRENGTH
    slot = _slot(VALUE_DISTANCE)
    attention.k_proj.weight[slow, range(slot.start, slot.stop)] = MATCH_STRENGTH


def _rows(model: LlamaForCausalLM, head: int) -> slice:
    width = model.config.head_dim
    return slice(head * width, (head + 1) * width)
