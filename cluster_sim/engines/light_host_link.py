"""The link to host memory of a light engine: copies come one after the other, and requests wait for their loads."""

import math
from collections import deque

from cluster_sim.costs.step_work import CostModel
from cluster_sim.engines.light_request import LightRequest


class HostLink:
    """`seconds` and `tokens`: of the loads that requests have waited for, since the start."""

    def __init__(self, cost_model: CostModel) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self._model = cost_model
        self._free_s = 0.0
        # By the time they end.
        self._loading: deque[tuple[float, LightRequest]] = deque()

    def load(self, request: LightRequest, tokens: int, now_s: float) -> None:
        """`loaded` has the request once its tokens are on the device."""
        seconds = self._model.load_s(tokens)
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
        self._loading.append((self._occupy(seconds, now_s), request))

    def promote(self, tokens: int, now_s: float) -> None:
        """A load that no request waits for."""
        self._occupy(self._model.load_s(tokens), now_s)

    def store(self, tokens: int, now_s: float) -> None:
        self._occupy(self._model.store_s(tokens), now_s)

    def next_s(self) -> float:
        """When the next load ends that a request waits for."""
        return self._loading[0][0] if self._loading else math.inf

    def loaded(self) -> LightRequest:
        """Of the load that ends next; it is no longer waited for."""
        return self._loading.popleft()[1]

    def _occupy(self, seconds: float, now_s: float) -> float:
        """Returns when the copy ends."""
        self._free_s = max(self._free_s, now_s) + seconds
        return self._free_s
