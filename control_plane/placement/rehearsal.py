"""What the placer would decide for a request that is not there. Nothing is left of it.

A rehearsal sees membership, index, loads and running prefixes as the placer does. What a decision leaves behind is its
own: the seeded choice, what is explained, and the counts of reasons. Nothing is placed, sent or predicted.
"""

import random
from collections import OrderedDict

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.ids import RequestId
from control_plane.model.job import Job
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.placement.counts import PlacementCounts
from control_plane.placement.placer import Explanation, Placer

_NOBODY = RequestId("")


class Rehearsal(Placer):
    """Of one placer, at one moment; for one `explain`."""

    def __init__(self, placer: Placer) -> None:
        # Shared on purpose, whatever a placer has; what a decision changes is replaced.
        self.__dict__.update(placer.__dict__)
        self._choice = random.Random(0)
        self._explanations = OrderedDict()
        self.counts = PlacementCounts()

    def explain(self, token_ids: list[int], max_tokens: int, cache_salt: str) -> Explanation:
        """A request with a whole prompt: whether it would be disaggregated, and whom each pool would choose."""
        job = Job(
            request_id=_NOBODY,
            token_ids=token_ids,
            sampling=generation.SamplingParams(max_tokens=max_tokens),
            lifecycle=RequestLifecycle(_NOBODY),
            arrived_s=0.0,
            deadline_s=0.0,
            cache_salt=cache_salt,
        )
        self.weigh(job, is_whole=True)
        explanation = self._explanation(job)
        explanation.choices += [self._decided(job, pool, frozenset()) for pool in (wire.POOL_PREFILL, wire.POOL_DECODE)]
        return explanation
