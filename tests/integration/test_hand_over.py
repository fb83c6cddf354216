"""Answers that leave a real decode engine for another one, which pulls their KV: token for token those of one go.

Sampling of every kind, several at once, in both directions. What others would notice: the KV of another answer.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random

import pytest
import pytest_asyncio
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import EngineSection, HandoffSection
from cluster_core.engine_jobs import EngineJob, SamplingSpec
from cluster_core.ids import new_request_id
from tests.integration.conftest import until
from tests.integration.test_emitted_output import drawn
from tests.integration.worker_processes import WorkerProcess, decode_pair
from worker_runtime.wire_conversion import to_wire

pytestmark = pytest.mark.integration

Pair = tuple[WorkerProcess, WorkerProcess]
TRIALS = 40
AT_ONCE = 4
CHECKS = ("rachis_tokens", "rachis_checksums")


@pytest_asyncio.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    handoff = HandoffSection(verify_share=1.0)
    folder = tmp_path_factory.mktemp("decoders")
    async with decode_pair(folder, handoff, EngineSection(kv_blocks=200, max_model_len=1024)) as workers:
        yield workers


@dataclass(slots=True)
class Got:
    """What has come of an answer. handoff: with which it left."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    reason: int = generation.FINISH_REASON_UNSPECIFIED
    started: wire.DecodeStarted = field(default_factory=wire.DecodeStarted)
    handoff: wire.KvHandoff | None = None

    def take(self, delta: generation.CompletionDelta) -> None:
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += [(each.sampled.token_id, round(each.sampled.logprob, 3)) for each in delta.logprobs]


async def run(
    worker: WorkerProcess, job: EngineJob, so_far: Got | None = None, *, leaves_after: int | None = None
) -> Got:
    """The answer, from what has come of it. leaves_after: so many tokens here, and it is handed over."""
    request = to_wire(job, wire.DecodeRequest, request_id=new_request_id(), generation=worker.generation)
    if so_far is not None and so_far.handoff is not None:
        request.handoff.CopyFrom(so_far.handoff)
        request.emitted.token_ids.extend(so_far.token_ids)
        request.emitted.sent_chars = len(so_far.text)
    got = Got()
    async for message in worker.stub.Decode(request, timeout=120):
        match message.WhichOneof("event"):
            case "started":
                got.started = message.started
            case "delta":
                got.take(message.delta)
            case "end":
                got.take(message.end.delta)
                got.reason = message.end.finish_reason
            case "handed_over":
                got.handoff = message.handed_over
        if leaves_after is not None and len(got.token_ids) >= leaves_after and got.handoff is None and not got.reason:
            leaves_after = None
            leaving = wire.HandOverRequest(request_id=request.request_id, generation=worker.generation)
            await worker.stub.HandOver(leaving, timeout=60)
    return got


def job_of(rng: Random) -> EngineJob:
    """A prompt of several blocks that nobody has cached."""
    prompt = tuple(rng.randrange(32, 120) for _ in range(rng.randint(40, 400)))
    return EngineJob("", prompt, drawn(rng).job.sampling)


async def test_an_answer_that_is_handed_over_is_that_of_one_go(pair: Pair) -> None:
    rng, places, outcomes = Random(20_261), asyncio.Semaphore(AT_ONCE), list[int]()

    async def tried(number: int, job: EngineJob, leaves_after: int) -> None:
        one, other = pair if number % 2 else pair[::-1]
        async with places:
            head = await run(one, job, leaves_after=leaves_after)
            if head.handoff is None:
                return
            rest = await run(other, job, head)
            whole = await run(one, job)
        outcomes.append(rest.started.handoff)
        told = f"{job.sampling} after {len(head.token_ids)}"
        assert [*head.token_ids, *rest.token_ids] == whole.token_ids, told
        assert head.text + rest.text == whole.text, told
        assert [*head.logprobs, *rest.logprobs] == whole.logprobs, told
        assert rest.reason == whole.reason, told

    jobs = [job_of(rng) for _ in range(TRIALS)]
    await asyncio.gather(*(tried(*each) for each in ((i, job, rng.randint(1, 20)) for i, job in enumerate(jobs))))

    assert len(outcomes) > TRIALS / 3
    assert outcomes.count(generation.HANDOFF_OUTCOME_PULLED) > len(outcomes) / 2
    for worker in pair:
        counters = (await worker.status()).counters
        assert counters.handoffs_leased and counters.handoffs_verified
        assert counters.handoffs_mismatched == 0
        await until(worker.nothing_held, "the blocks are free")


@pytest.mark.parametrize("is_verified", [False, True])
async def test_the_kv_of_another_answer_gives_other_tokens_unless_somebody_looks(pair: Pair, is_verified: bool) -> None:
    """The bug is planted between the two engines: an answer comes with another one's blocks."""
    rng = Random(7 + is_verified)
    greedy = SamplingSpec(max_tokens=200, temperature=0.0, ignore_eos=True)
    # The other one has blocks enough, however many more tokens a busy engine makes of either before it leaves.
    jobs = [EngineJob("", tuple(rng.randrange(32, 120) for _ in range(length)), greedy) for length in (300, 500)]
    mine, others = [await run(pair[0], job, leaves_after=4) for job in jobs]
    assert mine.handoff is not None and others.handoff is not None
    params, foreign = (json.loads(each.handoff.connector_params) for each in (mine, others) if each.handoff)
    for key in ("remote_block_ids", "remote_request_id"):
        params[key] = foreign[key]
    if not is_verified:
        params.update(dict.fromkeys(CHECKS))
    mine.handoff.connector_params = json.dumps(params).encode()

    rest = await run(pair[1], jobs[0], mine)

    whole = await run(pair[0], jobs[0])
    is_right = [*mine.token_ids, *rest.token_ids] == whole.token_ids
    outcome = generation.HANDOFF_OUTCOME_RECOMPUTED if is_verified else generation.HANDOFF_OUTCOME_PULLED
    assert (rest.started.handoff, is_right) == (outcome, is_verified)
