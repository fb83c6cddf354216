"""Prompts of late, by their chunks: they say how chunks follow each other. Bounded by number and memory. Pure."""

from collections import OrderedDict

from control_plane.model.memory_use import MemoryUse
from kv_transfer.claims.prefix_chunks import Keys

_MOST_PROMPTS = 4096
# Of their chunks in all, as many as an index remembers, which is small in a test.
_KEY_BYTES = 8
_LEAST_BYTES = 1 << 20


class IndexPrompts:
    """Of one index. max_entries: the chunks that it remembers."""

    def __init__(self, max_entries: int) -> None:
        self._most_bytes = max(max_entries * _KEY_BYTES, _LEAST_BYTES)
        # By their last chunk, the latest one last.
        self._prompts: OrderedDict[int, Keys] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, keys: Keys) -> None:
        """One is asked for; those asked for longest ago make room. One that is longer than there is room for is not
        kept."""
        last = int(keys[-1])
        before = self._prompts.pop(last, None)
        self._bytes += keys.nbytes - (before.nbytes if before is not None else 0)
        self._prompts[last] = keys
        while len(self._prompts) > _MOST_PROMPTS or self._bytes > self._most_bytes:
            _, gone = self._prompts.popitem(last=False)
            self._bytes -= gone.nbytes

    def all(self) -> list[Keys]:
        return list(self._prompts.values())

    def memory(self) -> MemoryUse:
        return MemoryUse("index prompts", self._bytes, self._most_bytes, "index.max_entries")

    def check_invariants(self) -> None:
        assert self._bytes == sum(keys.nbytes for keys in self._prompts.values()), "bytes are miscounted"
        assert self._bytes <= self._most_bytes and len(self) <= _MOST_PROMPTS, "more prompts than may be"
