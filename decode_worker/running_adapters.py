"""Which LoRA adapters the requests of a list have, each request looked at once. Pure.

A step asks for that once for each request with an adapter that waits, while others run.
"""

from typing import Any

from kv_transfer.vllm_private import adapter_of


class RunningAdapters:
    """Of a list that requests are appended to and taken out of, and never put into the middle of."""

    def __init__(self) -> None:
        self._running: list[Any] = []
        # How many of it were looked at, the last of those, and what they all have; 0: none.
        self._seen = 0
        self._last: Any = None
        self._found: set[int] = set()

    def of(self, running: list[Any]) -> set[int]:
        """By vLLM's numbers. Where one that was looked at has gone, the last of those stands elsewhere: then all are
        looked at again, else those that have been appended since."""
        seen = self._seen
        if running is not self._running or (seen and running[seen - 1 : seen] != [self._last]):
            self._running, self._seen, self._found = running, 0, set()
        for request in running[self._seen :]:
            self._found.add(adapter_of(request))
            self._last = request
        self._seen = len(running)
        return self._found - {0}
