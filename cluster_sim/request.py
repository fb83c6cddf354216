"""One request on its way through the simulated cluster: what the production router keeps of it, and its times."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rachis.v1 import generation_pb2 as generation

from cluster_core.ids import RequestId
from cluster_sim.network import Transfer
from cluster_sim.worker import SimWorker
from cluster_sim.workloads import SimRequest
from control_plane.job import Job
from control_plane.placer import Flight
from control_plane.request import RequestLifecycle
from kv_transfer.prefix_chunks import PackedPrompt


@dataclass(slots=True, eq=False)
class Attempt:
    """A request on a worker, counted there by the router until `end`. number: the engine's name for it."""

    number: int
    worker: SimWorker
    flight: Flight
    counted: AbstractContextManager[Flight] | None

    @classmethod
    def begin(cls, number: int, worker: SimWorker, counted: AbstractContextManager[Flight]) -> "Attempt":
        return cls(number, worker, counted.__enter__(), counted)

    def end(self) -> None:
        if self.counted is not None:
            self.counted.__exit__(None, None, None)
            self.counted = None


@dataclass(slots=True, eq=False)
class Traveller:
    """prefill: the worker that computes the prompt, and keeps it until it has been pulled. decode: that of the answer.
    started: the decode worker has begun to answer."""

    number: int
    request: SimRequest
    job: Job
    prefill: Attempt | None = None
    decode: Attempt | None = None
    transfer: Transfer | None = None
    pull_asked_s: float = 0.0
    first_token_s: float | None = None
    started: bool = False
    prefill_attempts: int = 0
    decode_attempts: int = 0
    excluded: set[tuple[str, int]] = field(default_factory=set)

    @classmethod
    def of(cls, number: int, request: SimRequest, timeout_s: float) -> "Traveller":
        """Token ids are not known, and nobody asks for them: equal prompts have equal keys."""
        tokens = np.broadcast_to(np.uint32(0), request.prompt_tokens)
        name = RequestId(str(number))
        ids: Any = range(request.prompt_tokens)
        job = Job(
            request_id=name,
            token_ids=ids,
            sampling=generation.SamplingParams(max_tokens=request.output_tokens),
            lifecycle=RequestLifecycle(name),
            arrived_s=request.arrival_s,
            deadline_s=request.arrival_s + timeout_s,
            cache_salt=request.tenant,
            packed=PackedPrompt(tokens, request.keys),
            nonce="",
        )
        return cls(number, request, job)
