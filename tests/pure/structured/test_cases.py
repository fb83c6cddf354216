"""Drawn grammars: the same for the same seed, of every kind, and each can tell its texts from others."""

from collections import Counter

from tests.structured import cases
from tests.structured.cases import byte_ids, drawn


def test_the_same_seed_draws_the_same() -> None:
    for seed in range(50):
        (one, first), (other, second) = drawn(seed), drawn(seed)
        assert (one, first.fields) == (other, second.fields)


def test_every_kind_comes() -> None:
    kinds = Counter(next(iter(drawn(seed)[1].fields)) for seed in range(300))
    assert set(kinds) == {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}
    assert min(kinds.values()) >= 10


def test_no_grammar_takes_any_text() -> None:
    for seed in range(300):
        _, grammar = drawn(seed)
        assert not grammar.takes("\x00 nobody's text"), grammar.fields


def test_some_take_what_they_should() -> None:
    takes = dict.fromkeys(("choice", "grammar", "json_object"), False)
    for seed in range(300):
        _, grammar = drawn(seed)
        (name,) = grammar.fields
        texts = {"choice": str(grammar.fields.get("choice", [""])[0]), "json_object": "{}", "grammar": "x"}
        if name in takes:
            takes[name] |= grammar.takes(texts[name])
    assert all(takes.values())


def test_prompts_are_what_the_models_tokenizer_makes_of_bytes() -> None:
    assert byte_ids("k= é") == (74, 28, 220, 127, 102)
    assert sorted(cases._IDS.values()) == list(range(256))
