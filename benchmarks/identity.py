"""Token identity: the same prompts through the cluster and through one plain vLLM.

Prompts vary in length (1 to 1,500 tokens), content (recall questions, random tokens, shared prefixes) and in every
sampling option that the API takes, greedy and seeded. In fp32 the tokens, the text, the finish reason and the
log-probabilities must be equal. In lower precision, where batching flips near ties, each divergence is reported with
the gap between the two likeliest log-probabilities at the place where it happens.
"""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rachis import AsyncClient, Generated, token_prompt

from benchmarks.direct_call import DirectWorker
from builtin_model import recall

MAX_PROMPT_TOKENS = 1500
MAX_NEW_TOKENS = 24
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and how it is sampled."""

    index: int
    token_ids: tuple[int, ...]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the cluster and the plain engine part."""

    index: int
    prompt_tokens: int
    sampling: dict[str, Any]
    position: int
    cluster_token: int | None
    plain_token: int | None
    # Log-probability between the two likeliest tokens there.
    gap: float | None
    what: str


@dataclass(slots=True)
class Report:
    total: int = 0
    identical: int = 0
    pulled: int = 0
    kv_bytes: int = 0
    divergences: list[Divergence] = field(default_factory=list)


def make_cases(
    count: int, seed: int, vocabulary_size: int, max_model_len: int, encode: Callable[[str], list[int]] | None
) -> list[Case]:
    """Varied cases, the same for the same seed. `encode` turns recall questions into tokens, where it is given."""
    rng = random.Random(seed)
    longest = min(MAX_PROMPT_TOKENS, max_model_len - MAX_NEW_TOKENS)
    shared = [rng.randrange(vocabulary_size) for _ in range(longest)]
    cases = []
    for index in range(count):
        length = _length(rng, index, count, longest)
        tokens = _tokens(rng, length, vocabulary_size, shared, encode)
        cases.append(Case(index, tuple(tokens), _sampling(rng, index)))
    return cases


async def compare(
    cases: Sequence[Case],
    cluster: AsyncClient,
    plain: DirectWorker,
    concurrency: int,
    on_done: Callable[[], None],
    *,
    exact: bool,
) -> Report:
    """Runs every case on both sides, `concurrency` at a time through the cluster, one by one through plain vLLM."""
    report = Report(total=len(cases))
    slots = asyncio.Semaphore(concurrency)
    # Stock vLLM on a CPU dies of a seeded prompt that it prefills in chunks, which prompts that share a step are.
    alone = asyncio.Lock()

    async def plainly(case: Case) -> Generated:
        async with alone:
            return await plain.decode(list(case.token_ids), case.sampling)

    async def one(case: Case) -> None:
        async with slots:
            ours, theirs = await asyncio.gather(
                cluster.generate(token_prompt(case.token_ids), **case.sampling), plainly(case)
            )
        report.pulled += ours.completion.route.kv_bytes > 0
        report.kv_bytes += ours.completion.route.kv_bytes
        divergence = difference(case, ours, theirs, LOGPROB_TOLERANCE if exact else None)
        if divergence is None:
            report.identical += 1
        else:
            report.divergences.append(divergence)
        on_done()

    async with asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(one(case))
    return report


def difference(
    case: Case, ours: Generated, theirs: Generated, logprob_tolerance: float | None = None
) -> Divergence | None:
    """None when tokens, text and finish reason agree, and log-probabilities where a tolerance is given."""
    pairs = list(zip(ours.token_ids, theirs.token_ids, strict=False))
    position = next((at for at, (mine, other) in enumerate(pairs) if mine != other), len(pairs))
    what = ""
    if ours.token_ids != theirs.token_ids:
        what = "tokens"
    elif ours.text != theirs.text:
        what = "text"
    elif ours.completion.finish_reason != theirs.completion.finish_reason:
        what = "finish reason"
    elif logprob_tolerance is not None and not _close(ours, theirs, logprob_tolerance):
        what = "log-probabilities"
    if not what:
        return None
    return Divergence(
        index=case.index,
        prompt_tokens=len(case.token_ids),
        sampling=case.sampling,
        position=position,
        cluster_token=ours.token_ids[position] if position < len(ours.token_ids) else None,
        plain_token=theirs.token_ids[position] if position < len(theirs.token_ids) else None,
        gap=_gap(theirs, position),
        what=what,
    )


def _close(ours: Generated, theirs: Generated, tolerance: float) -> bool:
    if len(ours.logprobs) != len(theirs.logprobs):
        return False
    return all(
        mine.sampled.token_id == other.sampled.token_id
        and math.isclose(mine.sampled.logprob, other.sampled.logprob, rel_tol=tolerance, abs_tol=tolerance)
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True)
    )


def _gap(generated: Generated, position: int) -> float | None:
    if position >= len(generated.logprobs) or len(generated.logprobs[position].top) < 2:
        return None
    first, second = generated.logprobs[position].top[:2]
    return first.logprob - second.logprob


def _length(rng: random.Random, index: int, count: int, longest: int) -> int:
    """Every length class occurs: single tokens, block edges, the longest, and anything between."""
    edges = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, longest)
    if index < len(edges) and count >= 2 * len(edges):
        return min(edges[index], longest)
    return rng.randint(1, longest)


def _tokens(
    rng: random.Random,
    length: int,
    vocabulary_size: int,
    shared: list[int],
    encode: Callable[[str], list[int]] | None,
) -> list[int]:
    kind = rng.randrange(3)
    if kind == 0 and encode is not None and length >= recall.FACT_TOKENS + recall.QUESTION_TOKENS:
        return encode(recall.make_question(rng, length).text)[:length]
    if kind == 1:
        kept = rng.randint(0, length)
        return shared[:kept] + [rng.randrange(vocabulary_size) for _ in range(length - kept)]
    return [rng.randrange(vocabulary_size) for _ in range(length)]


def _sampling(rng: random.Random, index: int) -> dict[str, Any]:
    """Greedy and seeded in turn, each with some of the other options. Log-probabilities always: they explain a gap."""
    sampling: dict[str, Any] = {"max_tokens": rng.randint(1, MAX_NEW_TOKENS), "logprobs": 2}
    if index % 2 == 0:
        sampling["temperature"] = 0.0
    else:
        sampling |= {"temperature": rng.uniform(0.2, 1.5), "seed": rng.randrange(2**31)}
        options: dict[str, Any] = {
            "top_p": rng.uniform(0.5, 1.0),
            "top_k": rng.randint(1, 50),
            "min_p": rng.uniform(0, 0.2),
        }
        sampling |= _some(rng, options)
    penalties: dict[str, Any] = {
        "presence_penalty": rng.uniform(-1, 1.5),
        "frequency_penalty": rng.uniform(-1, 1.5),
        "repetition_penalty": rng.uniform(0.8, 1.5),
        "stop": [rng.choice("aeiost"), "=k"],
        "ignore_eos": True,
        "min_tokens": 1,
    }
    return sampling | _some(rng, penalties)


def _some(rng: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if rng.random() < 0.4}
