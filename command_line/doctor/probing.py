"""Probes: a few requests of the doctor's own, best effort and each bounded in time, that show what mechanisms do.

One prompt of random tokens, which nobody has sent before, is sent twice: is it handed off, and found in the cache?
Where the router has it computed where it is decoded, as it may, another one comes as a session, which it hands off.
The answers to it and to a short one are compared with those of one worker alone, which computes the prompt itself.
"""

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from rachis import AsyncClient, Generated, token_prompt
from rachis.session import RefusedError
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from benchmarks.direct_call import DirectWorker
from benchmarks.identity import LOGPROB_TOLERANCE, Case, difference
from cluster_core.errors import ConfigError
from cluster_wire.secret import read_secret
from command_line.doctor.seen import Comparison, Part, Probe, Seen, name_of
from command_line.router_admin import TIMEOUT_S
from control_plane.access.roles import Role
from control_plane.placement.disaggregation import Reason

PROBE_TIMEOUT_S = 30.0
MAX_TOKENS = 8
# Longest prompt that is worth the work; with more `placement.local_prefill_tokens` nothing is handed off by its length.
MOST_PROMPT_TOKENS = 8192
SHORT_PROMPT_TOKENS = 7
# A worker may be too busy for the prompt that it has computed.
_MOST_TRIES = 3
_BEST_EFFORT = 1
_SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
# They tell how near a tie was. An imitated GPU has none.
_LOGPROBS: dict[str, Any] = {"logprobs": 2}
# With them nothing that is cached is used.
_ALONE: dict[str, Any] = {**_SAMPLING, **_LOGPROBS, "prompt_logprobs": 0}
_EXACT = "float32"
_LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)


async def added(client: AsyncClient, seen: Seen) -> Seen:
    try:
        identity = await client.identity(TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return _without(seen, f"the router does not tell who asks: {error.code().name}: {error.details()}")
    model = next((view.registration.model for view in seen.workers if view.registration.HasField("model")), None)
    why = ""
    if Role.GENERATE not in identity.roles:
        why = f"the key `{identity.name}` has no role `{Role.GENERATE}`"
    elif model is None:
        why = "no worker has told its model yet"
    elif prompt_tokens(seen, model) < 1:
        why = f"the model takes {model.max_model_len} tokens, too few for a probe"
    if why or model is None:
        return _without(seen, why)
    sampling = _SAMPLING if model.imitates else {**_SAMPLING, **_LOGPROBS}
    prober = _Prober(client, max(_BEST_EFFORT, identity.lowest_priority), sampling)
    # Another one each time: nobody has sent it before.
    rng = random.Random(secrets.randbits(64))
    long, short = (
        [rng.randrange(model.vocabulary_size) for _ in range(length)]
        for length in (prompt_tokens(seen, model), min(SHORT_PROMPT_TOKENS, prompt_tokens(seen, model)))
    )
    probes, answer = await prober.repeated(long)
    seen = replace(seen, probes=probes)
    if probes[0].is_local and not probes[0].error and probes[0].reason != Reason.PREFILL_DOWN:
        # Backwards it is another prompt.
        seen = replace(seen, session=await prober.session(long[::-1]))
    if answer is None:
        return seen.without(Part.WORKER_ALONE, "the probes have got no answer")
    return await _compared(prober, seen, [(long, answer), (short, None)], model)


def _without(seen: Seen, why: str) -> Seen:
    return seen.without(Part.PROBES, why).without(Part.WORKER_ALONE, why)


def prompt_tokens(seen: Seen, model: wire.ModelInfo) -> int:
    """Of the prompt that is sent twice: a few blocks, one chunk of the index, and more than is kept from the hand-off
    for being short."""
    config = seen.config
    blocks = [view.registration.block_size_tokens for view in seen.workers]
    block = max(blocks, default=0) or config.engine.block_size_tokens
    local = config.placement.local_prefill_tokens if config.placement.disaggregation == "conditional" else 0
    wanted = max(local, seen.index.chunk_tokens, 2 * block) + 2 * block + 1
    return min(wanted, MOST_PROMPT_TOKENS, model.max_model_len - MAX_TOKENS)


class _Prober:
    """priority, sampling: of its requests."""

    def __init__(self, client: AsyncClient, priority: int, sampling: Mapping[str, Any]) -> None:
        self._client = client
        self._priority = priority
        self._sampling = sampling

    async def repeated(self, prompt: Sequence[int]) -> tuple[list[Probe], Generated | None]:
        """Sent until a worker has had it twice, or an answer does not come; and the first answer."""
        probes: list[Probe] = []
        first: Generated | None = None
        had: set[str] = set()
        for _ in range(_MOST_TRIES):
            probe, answer = await self.ask(prompt)
            probes.append(probe)
            first = first or answer
            if probe.error or probe.computed_by in had:
                break
            had |= {probe.route.prefill_worker_id, probe.route.decode_worker_id} - {""}
        return probes, first

    async def ask(self, prompt: Sequence[int]) -> tuple[Probe, Generated | None]:
        request_id = f"doctor-{secrets.token_hex(8)}"
        try:
            answer = await self._client.generate(
                token_prompt(prompt),
                timeout_s=PROBE_TIMEOUT_S,
                request_id=request_id,
                priority=self._priority,
                **self._sampling,
            )
        except grpc.aio.AioRpcError as error:
            return _without_answer(prompt, error), None
        return Probe(len(prompt), answer.completion, await self._reason(request_id)), answer

    async def session(self, prompt: Sequence[int]) -> Probe | None:
        """None: the model has no sessions."""
        request_id = f"doctor-{secrets.token_hex(8)}"
        try:
            async with self._client.session(
                token_prompt(prompt),
                timeout_s=PROBE_TIMEOUT_S,
                request_id=request_id,
                priority=self._priority,
                **self._sampling,
            ) as session:
                async for _ in session.finish():
                    pass
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            return _without_answer(prompt, error)
        except RefusedError as error:
            return Probe(len(prompt), error=f"{error.status}: {error}")
        return Probe(len(prompt), session.completion, await self._reason(request_id))

    async def _reason(self, request_id: str) -> str:
        try:
            request = admin.ExplainPlacementRequest(request_id=request_id)
            told = await self._client.admin.ExplainPlacement(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            # The router remembers few, or none (`placement.explanations_mib`).
            return ""
        return str(told.disaggregation)


def _without_answer(prompt: Sequence[int], error: grpc.aio.AioRpcError) -> Probe:
    return Probe(len(prompt), error=f"{error.code().name}: {error.details()}", is_late=error.code() in _LATE)


async def _compared(
    prober: _Prober, seen: Seen, prompts: Sequence[tuple[Sequence[int], Generated | None]], model: wire.ModelInfo
) -> Seen:
    """With the answers of one decode worker alone: of another one than has answered the first, where there is one.

    prompts: each with its answer, where it was sent already.
    """
    served = seen.probes[0].route.decode_worker_id
    workers = sorted(seen.usable(wire.POOL_DECODE), key=lambda view: (name_of(view) == served, view.in_flight_requests))
    if model.imitates:
        return seen.without(Part.WORKER_ALONE, f"GPUs are imitated ({model.imitates}): tokens are arbitrary")
    if not workers:
        return seen.without(Part.WORKER_ALONE, "no decode worker may get requests")
    chosen, secret_file = workers[0].registration, seen.config.security.secret_path
    try:
        secret = read_secret(Path(secret_file)) if secret_file is not None else None
    except ConfigError as error:
        return seen.without(Part.WORKER_ALONE, f"workers answer the service's own parts alone: {error}")
    alone = DirectWorker(chosen.address, chosen.generation, secret)
    comparisons = []
    try:
        for number, (prompt, known) in enumerate(prompts):
            answer = known or (await prober.ask(prompt))[1]
            if answer is None:
                return seen.without(Part.WORKER_ALONE, "the probes have got no answer")
            theirs = await alone.decode(list(prompt), _ALONE, PROBE_TIMEOUT_S, priority=_BEST_EFFORT)
            is_exact = model.dtype == _EXACT
            divergence = difference(
                Case(number, tuple(prompt), {**_SAMPLING, **_LOGPROBS}),
                answer,
                theirs,
                LOGPROB_TOLERANCE if is_exact else None,
            )
            comparisons.append(Comparison(len(prompt), chosen.worker_id, is_exact, divergence))
    except grpc.aio.AioRpcError as error:
        told = f"{error.code().name}: {error.details()}"
        return seen.without(Part.WORKER_ALONE, f"{chosen.worker_id} at {chosen.address} does not answer alone: {told}")
    finally:
        await alone.close()
    return replace(seen, comparisons=comparisons)
