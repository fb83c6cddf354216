"""The vocabulary of the built-in model: which id means what, and the tokenizer made from it.

| ids        | tokens                                                                  |
|------------|-------------------------------------------------------------------------|
| 0 - 255    | bytes, so that any UTF-8 text can be written and read back exactly       |
| 256 - 319  | keys, `k0` to `k63`                                                      |
| 320 - 383  | values, 64 English words                                                 |
| 384 - 399  | `<s>`, `</s>`, the three roles, and eleven spare ones that round it to 400 |

A key or value is one token only where it stands as a word of its own (`k17=blue;`, not `hundred`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

KEYS: tuple[str, ...] = tuple(f"k{number}" for number in range(64))
# fmt: off
VALUES: tuple[str, ...] = (
    "amber", "azure", "beige", "black", "blue", "brown", "coral", "cyan", "gold", "gray", "green", "indigo", "ivory",
    "magenta", "olive", "pink", "purple", "red", "silver", "teal", "violet", "white",
    "badger", "bear", "beaver", "camel", "cat", "crow", "deer", "dog", "eagle", "falcon", "fox", "goat", "hawk",
    "heron", "horse", "koala", "lion", "lynx", "otter", "owl", "panda", "rabbit", "raven", "seal", "tiger", "whale",
    "apple", "banana", "cherry", "date", "fig", "grape", "kiwi", "lemon", "lime", "mango", "melon", "papaya", "peach",
    "pear", "plum", "quince",
)
# fmt: on
BOS, EOS = "<s>", "</s>"
ROLES: tuple[str, ...] = ("system", "user", "assistant")
SPARE_COUNT = 11
SPECIALS: tuple[str, ...] = (
    BOS,
    EOS,
    *(f"<|{role}|>" for role in ROLES),
    *(f"<|spare_{number}|>" for number in range(SPARE_COUNT)),
)

BYTE_COUNT = 256
FIRST_KEY_ID = BYTE_COUNT
FIRST_VALUE_ID = FIRST_KEY_ID + len(KEYS)
FIRST_SPECIAL_ID = FIRST_VALUE_ID + len(VALUES)
BOS_ID = FIRST_SPECIAL_ID
EOS_ID = FIRST_SPECIAL_ID + 1
VOCABULARY_SIZE = FIRST_SPECIAL_ID + len(SPECIALS)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message['role']) }}"
    "{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(max_tokens: int = 8192) -> PreTrainedTokenizerFast:
    """The tokenizer of this vocabulary; it adds no special token to plain text."""
    # These imports take seconds, and the constants above are wanted without them.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in (*KEYS, *VALUES)])
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )


def _vocabulary() -> dict[str, int]:
    from tokenizers import pre_tokenizers

    # The byte-level alphabet writes each of the 256 bytes as one printable character.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {token: number for number, token in enumerate((*alphabet, *KEYS, *VALUES, *SPECIALS))}
