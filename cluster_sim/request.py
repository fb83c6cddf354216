"""One request on its way through the simulated cluster: its journey, the calls that it is part of, and its times."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rachis.v1 import generation_pb2 as generation

from cluster_core.ids import RequestId
from cluster_sim.engines.engine import SimInput
from cluster_sim.network import Transfer
from cluster_sim.worker import SimWorker
from cluster_sim.workloads.requests import SimRequest
from control_plane.dispatch.journey import Journey, JourneyLimits
from control_plane.model.job import Job
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.placer import Flight, Placement
from kv_transfer.claims.prefix_chunks import PackedPrompt


@dataclass(slots=True, eq=False)
class Attempt:
    """A call to a worker. The router counts it there until `end`."""

    # The engine's name for it.
    number: int
    worker: SimWorker
    # The worker's, as placement knew it.
    generation: int
    flight: Flight
    # The call has not ended; afterwards a prefill worker may keep the prompt's KV under a lease.
    is_under_way: bool = True

    def end(self) -> None:
        self.is_under_way = False
        self.flight.end()


@dataclass(slots=True, eq=False)
class RequestRun:
    """What the simulated dispatcher knows of one request."""

    number: int
    request: SimRequest
    journey: Journey
    # Where the next call goes, as placement has decided.
    placement: Placement | None = None
    # The worker that computes the prompt, or keeps its KV under a lease that has not ended.
    prefill: Attempt | None = None
    decode: Attempt | None = None
    transfer: Transfer | None = None
    pull_requested_s: float = 0.0
    first_token_s: float | None = None
    # Whether the decode worker pulled the KV that it was told of.
    was_pulled: bool = False
    # Of a session: what has come of its prompt.
    session: SimInput | None = None
    # No prefill worker computes the prompt: its decode worker does, once the prompt is whole.
    awaits_prompt: bool = False

    @classmethod
    def of(cls, number: int, request: SimRequest, timeout_s: float, limits: JourneyLimits) -> "RequestRun":
        journey = Journey(job_of(number, request, timeout_s), limits)
        return cls(number, request, journey, session=request.inputs[0][1] if request.inputs else None)

    @property
    def job(self) -> Job:
        return self.journey.job

    @property
    def is_over(self) -> bool:
        return self.job.lifecycle.ended

    @property
    def prompt_is_whole(self) -> bool:
        return self.session is None or self.session.is_last

    def is_held_by(self, worker_id: str) -> bool:
        """The worker has prefilled the prompt, and keeps its KV."""
        return self.prefill is not None and not self.prefill.is_under_way and self.prefill.worker.name == worker_id

    def take(self, following: SimInput) -> None:
        """The next input of the session. From now on it is as if all that has come had come at once."""
        ids = self.job.token_ids
        if following.replaces:
            ids[:] = following.tokens
        else:
            ids.extend(following.tokens)
        self.session = replace(following, tokens=ids)


def job_of(number: int, request: SimRequest, timeout_s: float) -> Job:
    """What the router knows of the request when it arrives.

    Token ids of requests are not known, and nothing needs them: equal prompts have equal keys. A session has its ids,
    as far as they have come.
    """
    first = request.inputs[0][1] if request.inputs else None
    name = RequestId(str(number))
    ids: Any = range(request.prompt_tokens) if first is None else list(first.tokens)
    tokens = np.broadcast_to(np.uint32(0), request.prompt_tokens)
    return Job(
        request_id=name,
        token_ids=ids,
        sampling=generation.SamplingParams(max_tokens=request.output_tokens),
        lifecycle=RequestLifecycle(name),
        arrived_s=request.arrival_s,
        deadline_s=request.arrival_s + timeout_s,
        scope=PrefixScope(request.tenant),
        prompt_changes=first is not None,
        packed=PackedPrompt(tokens, request.keys) if first is None else None,
        nonce="",
    )
