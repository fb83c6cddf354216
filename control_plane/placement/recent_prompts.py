"""Prompts that this router has sent out of late, so that a hot prefix can be computed once more elsewhere. Pure.

The index knows prefixes by keys alone; tokens are kept here, the newest ones within a bound on memory.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from control_plane.model.memory_use import MemoryUse
from control_plane.model.prefix_scope import PrefixScope
from kv_transfer.claims.prefix_chunks import Keys

_MOST_PROMPTS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class RecentPrompt:
    """A prompt with the names of its chunks."""

    token_ids: NDArray[np.uint32]
    keys: Keys
    scope: PrefixScope
    # Engine time that its prefill was expected to take where it was sent.
    expected_s: float

    @property
    def bytes(self) -> int:
        return self.token_ids.nbytes + self.keys.nbytes

    def begins_with(self, key: int, chunks: int) -> bool:
        """Whether the first so many chunks of it are those of this key."""
        return len(self.keys) >= chunks and int(self.keys[chunks - 1]) == key


class RecentPrompts:
    def __init__(self, most_bytes: int, most_prompts: int = _MOST_PROMPTS) -> None:
        self._prompts: deque[RecentPrompt] = deque()
        self._bytes = 0
        self._most_prompts = most_prompts
        self._most_bytes = most_bytes

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: RecentPrompt) -> None:
        self._prompts.append(prompt)
        self._bytes += prompt.bytes
        while len(self._prompts) > self._most_prompts or self._bytes > self._most_bytes:
            self._bytes -= self._prompts.popleft().bytes

    def memory(self) -> MemoryUse:
        return MemoryUse("recent prompts", self._bytes, self._most_bytes, "placement.recent_prompts_mib")

    def with_prefix(self, key: int, chunks: int) -> list[RecentPrompt]:
        """Those that begin with the first so many chunks of this key, newest first."""
        return [prompt for prompt in reversed(self._prompts) if prompt.begins_with(key, chunks)]
