"""The built-in model's vocabulary, tokenizer, recall questions and committed files; no engine runs here."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from builtin_model import WEIGHTS
from builtin_model.recall import (
    ADJECTIVES,
    CHAT_EXTRA_TOKENS,
    NOUNS,
    PLACES,
    VERBS,
    Fact,
    RecallQuestion,
    make_question,
    most_facts,
)
from builtin_model.vocabulary import (
    BYTE_COUNT,
    CHAT_TEMPLATE,
    EOS_ID,
    FIRST_SPECIAL_ID,
    KEYS,
    SPECIALS,
    VALUES,
    VOCABULARY_SIZE,
    build_tokenizer,
)
from tests import ROOT

WEIGHTS_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
MOST_WEIGHT_BYTES = 1_500_000

lengths = st.integers(min_value=20, max_value=1500)
seeds = st.integers(min_value=0, max_value=2**32)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text))


@given(text=st.text())
def test_any_text_comes_back_from_its_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(encode(tokenizer, text)) == text


@given(pieces=st.lists(st.sampled_from([*KEYS, *VALUES, *SPECIALS, " ", "=", "; ", "\n", "é", "x"])))
def test_text_of_known_words_comes_back_from_its_tokens(tokenizer: PreTrainedTokenizerFast, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert tokenizer.decode(encode(tokenizer, text)) == text


@given(ids=st.lists(st.integers(min_value=BYTE_COUNT, max_value=FIRST_SPECIAL_ID - 1), max_size=20))
def test_keys_and_values_are_not_skipped_as_special_tokens(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> None:
    words = (*KEYS, *VALUES)
    text = "".join(words[number - BYTE_COUNT] for number in ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_each_id_means_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCABULARY_SIZE == 400
    assert len(set(VALUES)) == len(VALUES) == len(KEYS) == 64
    words = (*KEYS, *VALUES, *SPECIALS)
    assert tokenizer.convert_tokens_to_ids(list(words)) == list(range(BYTE_COUNT, VOCABULARY_SIZE))


@pytest.mark.parametrize("word", [*KEYS, *VALUES])
def test_key_or_value_is_one_token_only_as_a_word(tokenizer: PreTrainedTokenizerFast, word: str) -> None:
    for before, after in (("", ""), (" ", "="), ("=", "; "), ("\n", ".")):
        ids = encode(tokenizer, before + word + after)
        assert len(ids) == len(before) + 1 + len(after)
        assert BYTE_COUNT <= ids[len(before)] < FIRST_SPECIAL_ID
    assert max(encode(tokenizer, f"x{word}x")) < BYTE_COUNT


def test_chat_template_writes_each_role_and_opens_the_reply(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "k1=blue; "},
        {"role": "user", "content": "k1="},
        {"role": "assistant", "content": "blue"},
        {"role": "user", "content": "k2="},
    ]
    closed = "<s><|system|>k1=blue; </s><|user|>k1=</s><|assistant|>blue</s><|user|>k2=</s>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == closed
    opened = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert opened == closed + "<|assistant|>"


def test_chat_template_refuses_an_unknown_role(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match="unknown role critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": ""}], tokenize=False)


@given(seed=seeds, tokens=lengths)
def test_question_has_the_length_asked_for(tokenizer: PreTrainedTokenizerFast, seed: int, tokens: int) -> None:
    question = make_question(random.Random(seed), tokens)
    assert len(encode(tokenizer, question.text)) == tokens
    chat = tokenizer.apply_chat_template(question.messages, tokenize=False, add_generation_prompt=True)
    assert len(encode(tokenizer, str(chat))) == tokens + CHAT_EXTRA_TOKENS


@given(seed=seeds, tokens=lengths)
def test_each_key_is_stated_once(tokenizer: PreTrainedTokenizerFast, seed: int, tokens: int) -> None:
    question = make_question(random.Random(seed), tokens)
    ids = encode(tokenizer, question.context)
    stated = [KEYS[number - BYTE_COUNT] for number in ids if BYTE_COUNT <= number < BYTE_COUNT + len(KEYS)]
    assert stated == [fact.key for fact in question.facts]
    assert len(set(stated)) == len(stated) <= most_facts(tokens)
    assert Fact(question.key, question.answer) in question.facts
    assert question.context.count(f"{question.key}={question.answer}; ") == 1


@given(seed=seeds, tokens=lengths)
def test_same_seed_gives_the_same_question(seed: int, tokens: int) -> None:
    assert make_question(random.Random(seed), tokens) == make_question(random.Random(seed), tokens)


@given(seed=seeds, tokens=lengths, value=st.sampled_from(VALUES))
def test_changed_fact_keeps_the_text_before_it(seed: int, tokens: int, value: str) -> None:
    question = make_question(random.Random(seed), tokens)
    changed = question.with_value(question.key, value)
    assert changed.answer == value
    before, _, after = question.text.partition(f"{question.key}={question.answer}; ")
    assert changed.text == f"{before}{question.key}={value}; {after}"


def test_another_key_can_be_asked_of_the_same_context() -> None:
    question = RecallQuestion((Fact("k1", "blue"), Fact("k2", "fig")), ("", "Rain. ", ""), "k1")
    other = question.asking("k2")
    assert (other.context, other.text, other.answer) == (
        "k1=blue; Rain. k2=fig; ",
        "k1=blue; Rain. k2=fig; k2=",
        "fig",
    )


def test_too_many_facts_for_the_length_are_refused() -> None:
    with pytest.raises(ValueError, match="hold 1 to 3 facts"):
        make_question(random.Random(0), 20, fact_count=4)
    with pytest.raises(ValueError, match="at least 7 tokens"):
        make_question(random.Random(0), 6)


def test_no_value_starts_a_filler_word() -> None:
    words = " ".join((*ADJECTIVES, *NOUNS, *VERBS, *PLACES)).split()
    assert not [(word, value) for word in words for value in VALUES if word.startswith(value)]


def test_importing_the_package_is_light() -> None:
    code = "import sys, builtin_model, builtin_model.recall; print({'torch', 'transformers'} & set(sys.modules))"
    root = ROOT
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_committed_weights_are_small_and_complete() -> None:
    assert {path.name for path in WEIGHTS.iterdir()} == WEIGHTS_FILES
    assert (WEIGHTS / "model.safetensors").stat().st_size <= MOST_WEIGHT_BYTES


def test_committed_configuration_fits_the_vocabulary_and_the_engine() -> None:
    config = json.loads((WEIGHTS / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == VOCABULARY_SIZE
    assert config["head_dim"] % 32 == 0
    assert config["eos_token_id"] == EOS_ID
    assert json.loads((WEIGHTS / "generation_config.json").read_text())["eos_token_id"] == EOS_ID


def test_committed_tokenizer_is_the_built_one(tokenizer: PreTrainedTokenizerFast) -> None:
    committed = AutoTokenizer.from_pretrained(WEIGHTS)
    text = f"k1=blue; naïve hundred k170 {''.join(SPECIALS)}"
    assert committed.encode(text) == encode(tokenizer, text)
    assert committed.chat_template == CHAT_TEMPLATE
    assert committed.eos_token_id == EOS_ID
