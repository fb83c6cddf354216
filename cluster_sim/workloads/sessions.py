"""Requests whose prompts come piece by piece: the sessions of `streaming`, as a simulated run takes them."""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cluster_core.engine_jobs import SessionMode
from cluster_sim.engines.engine import SimInput
from cluster_sim.workloads.requests import SERVICE, SimRequest
from cluster_sim.workloads.section import STREAMS, WorkloadSection
from cluster_sim.workloads.streaming import TracedSession, WorkloadSpec, draw_sessions
from kv_transfer.claims.prefix_chunks import chunk_keys, root_key

_VOCABULARY, _LONGEST = 32_000, 131_072


def streams(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    mode = STREAMS[settings.kind]
    spec = WorkloadSpec(mode, settings.requests, settings.requests_per_s, settings.token_scale, seed=seed)

    def requests() -> Iterator[SimRequest]:
        rng = random.Random(f"streams/{seed}")
        for session in draw_sessions(spec, _VOCABULARY, _LONGEST):
            output = max(1, round(settings.output_tokens * rng.uniform(0.5, 1.5)))
            yield _session(session, output, settings.block_tokens)

    return requests if settings.streaming else lambda: _when_whole(requests())


def _session(session: TracedSession, output_tokens: int, block_tokens: int) -> SimRequest:
    prompt = np.array(session.prefix, dtype=np.uint32)
    inputs = [(0.0, _input(prompt, prompt, 0, block_tokens))]
    for number, each in enumerate(session.inputs, 1):
        before, is_last = prompt, number == len(session.inputs)
        brought = np.array([*each.tokens, *(session.closing if is_last else ())], dtype=np.uint32)
        replaces = session.mode is SessionMode.UPDATE
        prompt = brought if replaces else np.concatenate([before, brought])
        shorter = min(len(before), len(prompt))
        differing = np.flatnonzero(before[:shorter] != prompt[:shorter])
        kept = int(differing[0]) if len(differing) else shorter
        following = _input(prompt, brought, kept, block_tokens, replaces=replaces, is_last=is_last)
        inputs.append((each.at_s - session.arrival_s, following))
    return SimRequest(
        session.arrival_s, len(prompt), output_tokens, inputs[-1][1].keys, inputs=tuple(inputs), mode=session.mode
    )


def _input(
    prompt: NDArray[np.uint32], brought: NDArray[np.uint32], kept: int, block_tokens: int, **flags: bool
) -> SimInput:
    return SimInput(
        brought.tolist(), len(prompt), kept, chunk_keys(prompt, root_key(SERVICE, ""), block_tokens), **flags
    )


def _when_whole(sessions: Iterator[SimRequest]) -> Iterator[SimRequest]:
    """Each as a request that arrives when its prompt is whole, by that time."""
    waiting: list[tuple[float, int, SimRequest]] = []
    for number, each in enumerate(sessions):
        while waiting and waiting[0][0] <= each.arrival_s:
            yield heapq.heappop(waiting)[2]
        whole = replace(each, arrival_s=each.complete_s, inputs=())
        heapq.heappush(waiting, (whole.arrival_s, number, whole))
    while waiting:
        yield heapq.heappop(waiting)[2]
