"""The five workloads of the comparison with an imitated service, at three loads each, and their prompts; pure.

Prompts and answers are scaled to what imitated workers of a slow GPU serve some hundreds of in a minute.

    conversation   turns that come back with all before them in front; the shape of the Mooncake trace
    long_prompts   nothing shared, a few tokens of answer: the prefill pool has the work
    long_answers   a shared instruction and a short question, long answers: the decode pool has it
    retrieval      streaming sessions of Stream2LLM's crawler: pages are appended while they are prefilled
    agents         coding agents: a prompt that grows turn by turn and is rewritten now and then

A load is a share of what the busier pool can do, by the cost model alone: what a prompt shares with those before it is
taken for cached.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from benchmarks.validation.cluster import Prompt
from cluster_sim.costs.step_work import CostModel, StepWork, prefill_work
from cluster_sim.workloads.opening import open_workload
from cluster_sim.workloads.requests import SimRequest, block_names
from cluster_sim.workloads.section import WorkloadSection

WORKLOADS: Mapping[str, WorkloadSection] = {
    "conversation": WorkloadSection(kind="conversation", token_scale=0.15),
    "long_prompts": WorkloadSection(
        kind="prefix_groups", groups=1, shared_tokens=0, own_tokens=2000, output_tokens=8
    ),
    "long_answers": WorkloadSection(
        kind="prefix_groups", groups=5, shared_tokens=512, own_tokens=96, output_tokens=160
    ),
    "retrieval": WorkloadSection(kind="crawler", token_scale=0.25, output_tokens=48),
    "agents": WorkloadSection(kind="agents", token_scale=0.1),
}  # fmt: skip
LOADS: Mapping[str, float] = {"low": 0.2, "middle": 0.5, "high": 0.8}

# Requests that decode together where the decode pool is busy.
_BATCH = 16
# A workload's hits depend on its rate, and its rate on its hits.
_TRIES = 3
_FEWEST = 8


def drawn(
    workload: WorkloadSection,
    share: float,
    seconds: float,
    costs: CostModel,
    workers: Mapping[str, int],
    block_tokens: int,
    seed: int,
) -> list[SimRequest]:
    """Requests that arrive within about so many seconds. workers: of each pool. No two seeds share a block."""
    requests_per_s = 1.0
    for _ in range(_TRIES):
        requests = _opened(workload, requests_per_s, seconds, block_tokens, seed)
        requests_per_s = share / busiest_s(requests, costs, workers, block_tokens)
    return _opened(workload, requests_per_s, seconds, block_tokens, seed)


def busiest_s(requests: Sequence[SimRequest], costs: CostModel, workers: Mapping[str, int], block_tokens: int) -> float:
    """Seconds that a request takes of the busier pool, in the mean."""
    seen: set[int] = set()
    prefill_s = decode_s = 0.0
    for each in requests:
        found = sum(1 for _ in takewhile(seen.__contains__, each.keys.tolist())) * block_tokens
        found = min(found, each.prompt_tokens - 1)
        seen.update(each.keys.tolist())
        prefill_s += costs.step_s(prefill_work([(found, each.prompt_tokens - found)]))
        context = _BATCH * (each.prompt_tokens + each.output_tokens / 2)
        decode_s += (each.output_tokens - 1) * costs.step_s(StepWork(0, 0.0, _BATCH, context, context)) / _BATCH
    busier_s = max(prefill_s / workers["prefill"], decode_s / workers["decode"])
    return busier_s / len(requests)


def _opened(
    workload: WorkloadSection, requests_per_s: float, seconds: float, block_tokens: int, seed: int
) -> list[SimRequest]:
    number = max(_FEWEST, round(requests_per_s * seconds))
    update = {"requests_per_s": requests_per_s, "requests": number, "block_tokens": block_tokens}
    requests = open_workload(workload.model_copy(update=update), seed)
    own = np.uint64(random.Random(f"keys/{seed}").getrandbits(64))
    # Sessions have tokens, which a seed draws, and keys of these.
    return [each if each.inputs else replace(each, keys=block_names(each.keys ^ own)) for each in requests]


def prompts_of(requests: Iterable[SimRequest], block_tokens: int, vocabulary_size: int, seed: int) -> list[Prompt]:
    """Two prompts share the tokens of the blocks that the requests share, and no whole block besides."""
    return [
        _session(each, vocabulary_size) if each.inputs else _prompt(each, block_tokens, vocabulary_size, (seed, number))
        for number, each in enumerate(requests)
    ]


def _prompt(request: SimRequest, block_tokens: int, vocabulary_size: int, own_seed: tuple[int, int]) -> Prompt:
    blocks = [np.random.default_rng(key).integers(vocabulary_size, size=block_tokens) for key in request.keys.tolist()]
    rest = request.prompt_tokens - len(blocks) * block_tokens
    own = np.random.default_rng(own_seed).integers(vocabulary_size, size=rest)
    return Prompt(request.arrival_s, tuple(np.concatenate([*blocks, own]).tolist()), request.output_tokens)


def _session(request: SimRequest, vocabulary_size: int) -> Prompt:
    pieces = tuple(
        (after_s, tuple(token % vocabulary_size for token in given.tokens)) for after_s, given in request.inputs
    )
    tokens = tuple(token for _, piece in pieces for token in piece)
    return Prompt(request.arrival_s, tokens, request.output_tokens, pieces)
