"""One request on its way through the simulated cluster: what the production router keeps of it, and its times."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rachis.v1 import generation_pb2 as generation

from cluster_core.ids import RequestId
from cluster_sim.engine import SimInput
from cluster_sim.network import Transfer
from cluster_sim.worker import SimWorker
from cluster_sim.workloads import SimRequest
from control_plane.model.job import Job
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.placement.placer import Flight
from kv_transfer.claims.prefix_chunks import PackedPrompt


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
    started: the decode worker has begun to answer. session: of one whose prompt comes in pieces, what has come; alone:
    it waits for the rest of its prompt, to be prefilled where it decodes."""

    number: int
    request: SimRequest
    job: Job
    prefill: Attempt | None = None
    decode: Attempt | None = None
    transfer: Transfer | None = None
    pull_asked_s: float = 0.0
    first_token_s: float | None = None
    started: bool = False
    session: SimInput | None = None
    alone: bool = False
    prefill_attempts: int = 0
    decode_attempts: int = 0
    excluded: set[tuple[str, int]] = field(default_factory=set)

    @classmethod
    def of(cls, number: int, request: SimRequest, timeout_s: float) -> "Traveller":
        """Token ids of requests are not known, and nobody asks for them: equal prompts have equal keys. A session has
        them, as far as they have come."""
        first = request.inputs[0][1] if request.inputs else None
        name = RequestId(str(number))
        ids: Any = range(request.prompt_tokens) if first is None else list(first.tokens)
        tokens = np.broadcast_to(np.uint32(0), request.prompt_tokens)
        job = Job(
            request_id=name,
            token_ids=ids,
            sampling=generation.SamplingParams(max_tokens=request.output_tokens),
            lifecycle=RequestLifecycle(name),
            arrived_s=request.arrival_s,
            deadline_s=request.arrival_s + timeout_s,
            cache_salt=request.tenant,
            prompt_changes=first is not None,
            packed=PackedPrompt(tokens, request.keys) if first is None else None,
            nonce="",
        )
        return cls(number, request, job, session=first)

    @property
    def is_whole(self) -> bool:
        """Its prompt is."""
        return self.session is None or self.session.is_last

    def take(self, following: SimInput) -> None:
        """The next input of the session. From now on it is as if all that has come had come at once."""
        ids = self.job.token_ids
        if following.replaces:
            ids[:] = following.tokens
        else:
            ids.extend(following.tokens)
        self.session = replace(following, tokens=ids)
