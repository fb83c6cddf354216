"""API keys among the options of a gateway's front (`gateway.options`): told apart from the others, and masked. Pure.

vLLM takes them as `--api-key=KEY` or as `--api-key KEY ...`, up to the next option, with `_` for `-` and the name cut.
"""

from collections.abc import Iterator, Sequence

_NAME = "--api-key"
_SHORTEST = "--api-k"
MASK = "***"


def apart(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """The other options, and the keys."""
    others = [text for text, is_of_keys, _ in _told(options) if not is_of_keys]
    return others, [key for _, _, key in _told(options) if key]


def masked_keys(options: Sequence[str]) -> list[str]:
    return [text.removesuffix(key) + MASK if key else text for text, _, key in _told(options)]


def _told(options: Sequence[str]) -> Iterator[tuple[str, bool, str]]:
    """Each option, whether it is one of those for keys, and the key in it."""
    takes_keys = False
    for text in options:
        if text.startswith("-"):
            name, equals, value = text.partition("=")
            name = name.replace("_", "-")
            is_name = name.startswith(_SHORTEST) and _NAME.startswith(name)
            takes_keys = is_name and not equals
            yield text, is_name, value if is_name else ""
        else:
            yield text, takes_keys, text if takes_keys else ""
