"""Training batches: what one step of training sees.

A batch mixes two kinds of rows of one length: a random sequence repeated to the end of the row, which teaches
copying, and a recall context followed by several questions with their answers, in the plain or a chat form.
Masks say which tokens the row makes foreseeable at all, which are recalled values and which are copied.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from builtin_model.recall import RecallQuestion, make_question, most_facts
from builtin_model.vocabulary import BYTE_COUNT, FIRST_SPECIAL_ID, FIRST_VALUE_ID

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLAIN_TURN_TOKENS = 5
CHAT_TURN_TOKENS = 7
MOST_TURNS = 16
MOST_PERIOD = FIRST_SPECIAL_ID - BYTE_COUNT


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids` [rows, length]; masks of the same shape mark every scored token, recalled values, and copies."""

    ids: torch.Tensor
    targets: torch.Tensor
    answers: torch.Tensor
    copies: torch.Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch: tokens, the first one scored, and the first one that may be an answer."""

    ids: list[int]
    scored_from: int
    answers_from: int


def make_batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, length: int, copy_rows: int, recall_rows: int
) -> Batch:
    """Draw a batch; the same `rng` state gives the same batch."""
    rows = [copy_row(rng, length) for _ in range(copy_rows)]
    rows += [recall_row(rng, tokenizer, length) for _ in range(recall_rows)]
    ids = torch.tensor([row.ids for row in rows])
    position = torch.arange(length)
    targets = position >= torch.tensor([[row.scored_from] for row in rows])
    asked = position >= torch.tensor([[row.answers_from] for row in rows])
    values = (ids >= FIRST_VALUE_ID) & (ids < FIRST_SPECIAL_ID)
    copied = torch.arange(len(rows)).unsqueeze(1) < copy_rows
    return Batch(ids, targets, asked & values, targets & copied)


def copy_row(rng: random.Random, length: int) -> Row:
    """Distinct tokens in random order, repeated; scored from where the repetition has shown itself."""
    # Half of the rows draw from keys and values alone, which are a third of all tokens but carry the recall.
    first = rng.choice((0, BYTE_COUNT))
    period = rng.randint(3, min(length // 2, MOST_PERIOD))
    once = rng.sample(range(first, FIRST_SPECIAL_ID), period)
    repeats = -(-length // period)
    return Row((once * repeats)[:length], scored_from=period + 1, answers_from=length)


def recall_row(rng: random.Random, tokenizer: PreTrainedTokenizerFast, length: int) -> Row:
    """A context and as many questions on it as fit well, each about another key."""
    turns = rng.randint(1, min(MOST_TURNS, max(1, length // 16)))
    form = rng.choice((_plain_row, _system_row, _user_row))
    return form(rng, tokenizer, length, turns)


def _plain_row(rng: random.Random, tokenizer: PreTrainedTokenizerFast, length: int, turns: int) -> Row:
    context, asked = _context(rng, length - turns * PLAIN_TURN_TOKENS, turns)
    text = context + "".join(f"{turn.question}{turn.answer}; " for turn in asked)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == length
    return Row(ids, scored_from=1, answers_from=length - turns * PLAIN_TURN_TOKENS)


def _system_row(rng: random.Random, tokenizer: PreTrainedTokenizerFast, length: int, turns: int) -> Row:
    # Three more tokens: the start of the sequence, the system role, and the end of its message.
    context, asked = _context(rng, length - turns * CHAT_TURN_TOKENS - 3, turns)
    messages = [{"role": "system", "content": context}]
    return _chat_row(tokenizer, length, messages, asked, turns)


def _user_row(rng: random.Random, tokenizer: PreTrainedTokenizerFast, length: int, turns: int) -> Row:
    # One more token, the start of the sequence: the context stands in the first question's message.
    context, asked = _context(rng, length - turns * CHAT_TURN_TOKENS - 1, turns)
    first, *rest = asked
    messages = [
        {"role": "user", "content": context + first.question},
        {"role": "assistant", "content": first.answer},
    ]
    return _chat_row(tokenizer, length, messages, rest, turns)


def _chat_row(
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    messages: list[dict[str, str]],
    asked: list[RecallQuestion],
    turns: int,
) -> Row:
    """Go on with the conversation; whichever message the context is in, only answers are values after it."""
    for turn in asked:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == length
    return Row(ids, scored_from=1, answers_from=length - turns * CHAT_TURN_TOKENS)


def _context(rng: random.Random, tokens: int, turns: int) -> tuple[str, list[RecallQuestion]]:
    """A context of exactly `tokens` tokens, and one question on it for each turn."""
    with_question = tokens + 2
    most = most_facts(with_question)
    fact_count = rng.randint(max(turns, most // 4), most)
    question = make_question(rng, with_question, fact_count)
    asked = [question.asking(fact.key) for fact in rng.sample(question.facts, turns)]
    return question.context, asked
