"""Sizes in tokens as people write and read them: 512k, 2M, in powers of ten."""

import re

from cluster_core.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_SIZE = re.compile(r"(\d{1,15})([kmg]?)", re.IGNORECASE | re.ASCII)


def parse_tokens(text: str, option: str) -> int:
    """512, 512k, 2M or 1G. Raises ConfigError that names the option."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"must be a number of tokens such as 500000, 512k or 2M, got {text!r}", field=option)
    return int(found[1]) * _UNITS[found[2].lower()]


def short_tokens(tokens: int) -> str:
    """As an option takes it: 2M, 512k, 1234."""
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)
