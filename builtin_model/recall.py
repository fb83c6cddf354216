"""Recall questions: prompts of any length whose right answer is known and easy to read.

A context states facts (`k17=blue; `) among filler sentences, the question is `k17=`, the answer `blue`.
In: a seeded `random.Random` and a length in tokens. Out: a frozen `RecallQuestion`, with facts and fillers
kept apart so that one fact can be changed and everything before it stays the same, byte for byte.

Lengths are exact without a tokenizer: a filler is plain ASCII at one token a character, a fact is
`k17`, `=`, `blue`, `;`, ` `, and a question is `k17`, `=`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from builtin_model.vocabulary import KEYS, VALUES

FACT_TOKENS = 5
QUESTION_TOKENS = 2
CHAT_EXTRA_TOKENS = 6
"""Tokens that the chat form of a question has beyond its plain form."""

# fmt: off
ADJECTIVES = (
    "old", "quiet", "heavy", "clever", "narrow", "distant", "busy", "patient", "sudden", "plain", "careful",
    "broken", "early", "modern",
)
NOUNS = (
    "clerk", "harbour", "window", "engine", "letter", "village", "teacher", "bridge", "market", "river", "doctor",
    "machine", "garden", "ticket", "captain", "station", "kitchen", "winter", "mountain", "library", "sailor",
    "valley", "picture", "hammer",
)
VERBS = (
    "counts", "follows", "repairs", "visits", "answers", "carries", "forgets", "watches", "opens", "paints",
    "borrows", "describes",
)
PLACES = (
    "near the water", "before noon", "in the rain", "after dinner", "behind the house", "without a word",
    "every morning", "along the road",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Fact:
    """One key and its value, as stated in a context."""

    key: str
    value: str

    @property
    def text(self) -> str:
        """The fact as the context writes it."""
        return f"{self.key}={self.value}; "


@dataclass(frozen=True, slots=True)
class RecallQuestion:
    """Facts, the fillers around them (one before each fact and one after the last), and the key asked for."""

    facts: tuple[Fact, ...]
    fillers: tuple[str, ...]
    key: str

    def __post_init__(self) -> None:
        keys = [fact.key for fact in self.facts]
        assert len(set(keys)) == len(keys), "each key is stated once"
        assert self.key in keys, "the key asked for is stated"
        assert len(self.fillers) == len(self.facts) + 1, "fillers stand around the facts"

    @property
    def context(self) -> str:
        """All facts and fillers, in order."""
        stated = (filler + fact.text for filler, fact in zip(self.fillers, self.facts, strict=False))
        return "".join(stated) + self.fillers[-1]

    @property
    def question(self) -> str:
        """What follows the context: the key and an equals sign."""
        return f"{self.key}="

    @property
    def answer(self) -> str:
        """The value of the key asked for: one token."""
        return next(fact.value for fact in self.facts if fact.key == self.key)

    @property
    def text(self) -> str:
        """The plain prompt; the model goes on with the answer and `;`."""
        return self.context + self.question

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat prompt; the model replies with the answer and ends its turn."""
        return [{"role": "system", "content": self.context}, {"role": "user", "content": self.question}]

    def with_value(self, key: str, value: str) -> RecallQuestion:
        """The same question with one fact changed; the text before that fact stays the same."""
        assert any(fact.key == key for fact in self.facts), f"{key} is not stated"
        facts = tuple(Fact(key, value) if fact.key == key else fact for fact in self.facts)
        return replace(self, facts=facts)

    def asking(self, key: str) -> RecallQuestion:
        """The same context with another question."""
        return replace(self, key=key)


def make_question(rng: random.Random, tokens: int, fact_count: int | None = None) -> RecallQuestion:
    """A question whose plain prompt is exactly `tokens` long; a chat prompt has `CHAT_EXTRA_TOKENS` more.

    `fact_count` is drawn when not given. Raises ValueError when the facts do not fit.
    """
    most = most_facts(tokens)
    if most < 1:
        raise ValueError(f"a question takes at least {FACT_TOKENS + QUESTION_TOKENS} tokens, not {tokens}")
    count = rng.randint(min(4, most), most) if fact_count is None else fact_count
    if not 1 <= count <= most:
        raise ValueError(f"{tokens} tokens hold 1 to {most} facts, not {count}")
    facts = [Fact(key, rng.choice(VALUES)) for key in rng.sample(KEYS, count)]
    sentences = filler_sentences(rng, tokens - QUESTION_TOKENS - FACT_TOKENS * count)
    return RecallQuestion(tuple(facts), _spread(rng, sentences, count + 1), rng.choice(facts).key)


def most_facts(tokens: int) -> int:
    """How many facts a plain prompt of this many tokens can state."""
    return min(len(KEYS), (tokens - QUESTION_TOKENS) // FACT_TOKENS)


def filler_sentences(rng: random.Random, tokens: int) -> list[str]:
    """Ordinary-looking sentences, `tokens` characters in all; the last one is cut to fit."""
    sentences: list[str] = []
    left = tokens
    while left > 0:
        sentence = _sentence(rng)
        if len(sentence) > left:
            # The cut ends in a space, so that a key after it still stands as a word of its own.
            sentence = sentence[: left - 1] + " "
        sentences.append(sentence)
        left -= len(sentence)
    return sentences


def _sentence(rng: random.Random) -> str:
    subject = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    return f"The {subject} {rng.choice(VERBS)} the {rng.choice(NOUNS)} {rng.choice(PLACES)}. "


def _spread(rng: random.Random, sentences: list[str], gaps: int) -> tuple[str, ...]:
    """Put each sentence into a gap drawn at random, keeping their order within a gap."""
    filled: list[str] = [""] * gaps
    for sentence in sentences:
        filled[rng.randrange(gaps)] += sentence
    return tuple(filled)
