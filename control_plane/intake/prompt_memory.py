"""How much memory the prompts of all requests and sessions of a router may take. What does not fit is refused.

Requests are counted as well (`admission`); a few of them with prompts of a million tokens are as much as thousands.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from cluster_core.errors import OverloadedError
from control_plane.model.memory_use import MemoryUse

# A list's place and Python's number, the message it came in, and the packed copy.
TOKEN_BYTES = 48
_LIMIT = "router.max_prompt_mib"
_RETRY_AFTER_MS = 1000


class PromptMemory:
    """Of one router."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    @contextmanager
    def holding(self, tokens: int = 0) -> Iterator["HeldPrompt"]:
        """One prompt, while the block runs. Raises OverloadedError where it does not fit."""
        held = HeldPrompt(self)
        held.resize(tokens)
        try:
            yield held
        finally:
            held.resize(0)

    def use(self) -> MemoryUse:
        return MemoryUse("prompts", self.used_bytes, self.limit_bytes, _LIMIT)


class HeldPrompt:
    """A prompt that may still grow, shrink or be replaced."""

    def __init__(self, memory: PromptMemory) -> None:
        self._memory = memory
        self._bytes = 0

    def resize(self, tokens: int) -> None:
        """It has so many tokens now. Raises OverloadedError, and changes nothing, where these do not fit."""
        memory, wanted = self._memory, tokens * TOKEN_BYTES
        more = wanted - self._bytes
        if more > 0 and memory.used_bytes + more > memory.limit_bytes:
            raise OverloadedError(
                f"prompts take {memory.used_bytes >> 20} MiB, {more / (1 << 20):.1f} MiB more do not fit, see {_LIMIT}",
                retry_after_ms=_RETRY_AFTER_MS if wanted <= memory.limit_bytes else None,
            )
        memory.used_bytes += more
        self._bytes = wanted
