"""What an imitated GPU answers with: the same everywhere, something else for another prompt, and text."""

from hypothesis import given
from hypothesis import strategies as st

from imitated_gpu.answers import Answers, answer_tokens

TOKENS = list(range(50, 90))
PROMPT = [1, 2, 3, 400]


def answer(prompt: list[int], seed: int | None = None, count: int = 64) -> list[int]:
    answers = Answers(TOKENS)
    answer_seed = answers.seed_of(prompt, seed)
    return [answers.token(answer_seed, len(prompt) + place) for place in range(count)]


def test_every_worker_gives_the_same_answer() -> None:
    assert answer(PROMPT) == answer(PROMPT)
    assert answer(PROMPT)[:4] == [78, 63, 89, 57]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64), st.integers(0, 63))
def test_another_token_anywhere_in_the_prompt_gives_another_answer(prompt: list[int], at: int) -> None:
    at %= len(prompt)
    other = [*prompt[:at], prompt[at] ^ 1, *prompt[at + 1 :]]
    assert answer(prompt) != answer(other)


def test_choices_with_seeds_of_their_own_differ() -> None:
    assert len({tuple(answer(PROMPT, seed)) for seed in range(8)}) == 8


def test_an_answer_does_not_repeat_itself() -> None:
    assert len(set(answer(PROMPT))) > 20


def test_answers_are_made_of_text_and_end_nothing() -> None:
    texts = ["a", "b", "\n", "\ufffd", "</s>", "", "blue"]
    assert answer_tokens(len(texts), {4}, texts.__getitem__) == [0, 1, 6]


def test_a_vocabulary_without_plain_text_gives_what_ends_nothing() -> None:
    assert answer_tokens(3, {1}, lambda token: "\ufffd") == [0, 2]


def test_the_built_in_vocabulary_gives_bytes_and_words() -> None:
    from builtin_model.vocabulary import EOS_ID, FIRST_SPECIAL_ID, SPECIALS, VALUES, VOCABULARY_SIZE

    special = range(FIRST_SPECIAL_ID, FIRST_SPECIAL_ID + len(SPECIALS))
    tokens = answer_tokens(VOCABULARY_SIZE, special, lambda token: "x")
    assert EOS_ID not in tokens
    assert len(tokens) == VOCABULARY_SIZE - len(SPECIALS) > len(VALUES)
