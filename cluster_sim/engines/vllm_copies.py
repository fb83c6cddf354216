"""The link to host memory of an engine with vLLM's scheduler: copies in the background, in simulated time."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from cluster_sim.costs.step_work import CostModel
from kv_transfer.host_memory.copy_worker import BackgroundCopy, CopyReport
from kv_transfer.host_memory.host_swap import COPIES
from kv_transfer.host_memory.swap_ledger import SwapCopies
from kv_transfer.tiers.host_tiering import BACKGROUND


class Copies:
    """Those in the background come one after the other; the step waits for the others."""

    def __init__(self, cost_model: CostModel, block_tokens: int) -> None:
        # Of the loads since the start.
        self.loaded_s, self.loaded_tokens = 0.0, 0
        # In the background: end, number, direction and seconds of each.
        self.under_way: deque[tuple[float, int, str, float]] = deque()
        self._model = cost_model
        self._block_tokens = block_tokens
        self._free_s = 0.0

    def begin(self, metadata: Any, now_s: float) -> float:
        """The copies of a step. Returns the seconds of those that the step waits for."""
        self.begin_background(getattr(metadata, BACKGROUND), now_s)
        return self.waited_s(getattr(metadata, COPIES))

    def begin_background(self, copies: Sequence[BackgroundCopy], now_s: float) -> None:
        for each in copies:
            out, back = len(each.copies.out) * self._block_tokens, len(each.copies.back) * self._block_tokens
            seconds = self._model.store_s(out) if out else self._model.load_s(back)
            self._count_load(back)
            self._free_s = max(self._free_s, now_s) + seconds
            self.under_way.append((self._free_s, each.number, "out" if out else "back", seconds))

    def waited_s(self, copies: SwapCopies) -> float:
        """Seconds of copies that their step waits for."""
        out, back = len(copies.out) * self._block_tokens, len(copies.back) * self._block_tokens
        seconds = (self._model.store_s(out) if out else 0.0) + (self._model.load_s(back) if back else 0.0)
        self._count_load(back)
        return seconds

    def _count_load(self, tokens: int) -> None:
        if tokens:
            self.loaded_s += self._model.load_s(tokens)
            self.loaded_tokens += tokens

    def next_s(self) -> float:
        return self.under_way[0][0] if self.under_way else math.inf

    def ended(self, now_s: float) -> CopyReport | None:
        """Those that have ended since the last call."""
        if self.next_s() > now_s:
            return None
        ended: Counter[int] = Counter()
        seconds: Counter[str] = Counter()
        while self.next_s() <= now_s:
            _, number, direction, each_s = self.under_way.popleft()
            ended[number] += 1
            seconds[direction] += each_s  # type: ignore[assignment]
        return CopyReport(ended, set(), seconds)
