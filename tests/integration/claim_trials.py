"""What `test_block_events.py` lets a real engine do, in a process of its own."""

import asyncio
import contextlib
import dataclasses
import os
import random
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from cluster_configs.schema import EngineSection, HandoffSection, IndexSection, ModelSection, TiersSection
from cluster_core.engine_jobs import EngineJob, SamplingSpec
from cluster_core.engine_reports import PrefixClaims
from cluster_wire.redis_client import connect
from control_plane.service.embedded_redis import EmbeddedRedis
from kv_transfer.claims.chunk_claims import ChunkClaims
from kv_transfer.claims.prefix_chunks import chunk_keys, root_key
from tests.counting import gloo_loops
from tests.examples import WIDE
from tests.fakes.claims_reader import read_claims
from worker_runtime.claim_feed import ClaimFeed
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment
from worker_runtime.vllm_engine import VllmEngine

_RESET_TIMEOUT_S = 120.0
# Of random prompts, each followed by an audit.
ROUNDS = 60 if WIDE else 30
SERVICE, WORKER = "svc-trial", "w-0"
CHUNK_TOKENS = 64
INDEX = IndexSection(chunk_tokens=CHUNK_TOKENS, write_interval_s=0.001, snapshot_keys=50)


class Trial:
    """An engine with little memory, its feed, and what a reader of the stream believes."""

    def __init__(self, engine: VllmEngine, feed: ClaimFeed, client: Any) -> None:
        self.engine, self.feed, self._client = engine, feed, client
        self._number = 0
        # All keys that anything which ran can have.
        self.possible: set[int] = set()

    async def answer(self, prompt: tuple[int, ...], max_tokens: int = 3, salt: str = "") -> None:
        self._number += 1
        sampling = SamplingSpec(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        job = EngineJob(f"job-{self._number}", prompt, sampling, cache_salt=salt)
        tokens = [token async for output in self.engine.generate(job) for token in output.token_ids]
        self.possible |= keys_of((*prompt, *tokens), salt)

    async def truth(self) -> PrefixClaims:
        """What the pools hold; asserts that a reader comes to believe just that."""
        for _ in range(100):
            sequence, claims = await self.feed.audit(self.engine)
            read = await read_claims(self._client, SERVICE, WORKER)
            while read is None or read.sequence < sequence:
                await asyncio.sleep(0.005)
                read = await read_claims(self._client, SERVICE, WORKER)
            if read.sequence == sequence:
                assert read.claims == claims, "the stream says something else than the pools"
                return claims
        raise AssertionError("the engine never pauses")


def keys_of(tokens: tuple[int, ...], salt: str = "") -> set[int]:
    return set(chunk_keys(tokens, root_key(SERVICE, salt), CHUNK_TOKENS).tolist())


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(250) for _ in range(count))


async def one_prompt(trial: Trial) -> dict[str, Any]:
    prompt = tokens(random.Random(1), 200)
    await trial.answer(prompt)
    first = (await trial.truth()).device
    await trial.answer(prompt, salt="tenant")
    second = (await trial.truth()).device
    return {
        "plain": first == keys_of(prompt[:192]),
        "salted": second - first == keys_of(prompt[:192], "tenant"),
        "alike": len(keys_of(prompt) & keys_of(prompt, "tenant")),
    }


async def random_prompts(trial: Trial) -> dict[str, Any]:
    """Shared prefixes, several at once, some aborted, more than fits: looked at again and again."""
    rng = random.Random(2)
    stems = [tokens(rng, 150) for _ in range(4)]
    audits, most_host, removed = 0, 0, 0
    before: frozenset[int] = frozenset()

    async def one() -> None:
        prompt = rng.choice(stems)[: rng.randrange(20, 151)] + tokens(rng, rng.randrange(100))
        limit_s, count, salt = (
            rng.choice((None, None, None, 0.01)),
            rng.randrange(1, 70),
            rng.choice(("", "", "tenant")),
        )
        try:
            async with asyncio.timeout(limit_s):
                await trial.answer(prompt, count, salt)
        except TimeoutError:
            trial.possible |= keys_of(prompt) | keys_of(prompt, "tenant")
            # What it had generated may fill a chunk: greedy, it is the beginning of this.
            await trial.answer(prompt, count, salt)

    for _ in range(ROUNDS):
        running = [asyncio.create_task(one()) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.3:
            # In the midst of it.
            await trial.feed.audit(trial.engine)
        await asyncio.gather(*running)
        claims = await trial.truth()
        assert claims.device | claims.host <= trial.possible, "a key of nothing that ran"
        audits, most_host = audits + 1, max(most_host, len(claims.host))
        removed += len(before - claims.device)
        before = claims.device
    engine_claims = await trial.engine.look(lambda work: work.claims.chunks)
    assert engine_claims is not None
    counters = trial.engine.status().counters
    return {
        "audits": audits,
        "most_host": most_host,
        "removed": removed,
        "device": len(before),
        "snapshots": trial.feed.counters.snapshots,
        "losses": trial.feed.counters.losses,
        "nameless": engine_claims.nameless_blocks,
        "foreign": engine_claims.foreign_blocks,
        "cacheable_requests": counters.cacheable_requests,
        "stored_blocks": counters.stored_blocks,
        "costs": dataclasses.asdict(trial.engine.status().costs),
    }


async def lost_removals(trial: Trial) -> dict[str, Any]:
    """A plant: the claims do not hear of what leaves."""
    claims = await trial.engine.look(lambda work: work.claims.chunks)
    assert isinstance(claims, ChunkClaims)
    setattr(claims, "removed", lambda tier, hashes: None)  # noqa: B010 - for mypy
    rng, noticed = random.Random(3), False
    for _ in range(20):
        await trial.answer(tokens(rng, 250))
        try:
            await trial.truth()
        except AssertionError:
            noticed = True
            break
    del claims.removed
    return {"noticed": noticed}


async def reset(trial: Trial) -> dict[str, Any]:
    """After the plant as well nothing is left of what was wrong."""
    async with asyncio.timeout(_RESET_TIMEOUT_S):
        # Not while blocks are copied, which only the engine can be asked about.
        while not await trial.engine.look(lambda work: work.engine.reset_prefix_cache()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    left = await trial.truth()
    prompt = tokens(random.Random(4), 130)
    await trial.answer(prompt)
    return {
        "left": len(left.device | left.host),
        "again": (await trial.truth()).device == keys_of(prompt[:128]),
    }


TRIALS = {each.__name__: each for each in (one_prompt, random_prompts, lost_removals, reset)}


@contextlib.asynccontextmanager
async def trial_of(role: EngineRole) -> AsyncIterator[Trial]:
    section = EngineSection(kv_blocks=24, max_model_len=320, max_batched_tokens=192)
    tiers = TiersSection(host_ratio=1.0, frequency_threshold=1, eviction="lru", promotion_pause=0)
    settings = EngineSettings(
        ModelSection(), section, HandoffSection(), role, tiers=tiers, index=INDEX, service_id=SERVICE
    )
    os.environ.update(engine_environment(settings))
    with tempfile.TemporaryDirectory() as folder:
        server, engine = EmbeddedRedis(Path(folder)), VllmEngine(settings)
        await server.start()
        feed = ClaimFeed(connect(server.url, 5.0), SERVICE, WORKER, 1000, INDEX)
        engine.follow_claims(feed.changed)
        await engine.start(lambda phase: None, lambda why: None)
        await feed.open()
        task = asyncio.create_task(feed.keep())
        client = redis.Redis.from_url(server.url)
        try:
            yield Trial(engine, feed, client)
        finally:
            task.cancel()
            await engine.stop()
            await feed.close()
            await client.aclose()
            await server.stop()


def claim_trials(role: EngineRole) -> dict[str, Any]:
    """What came of each trial, on one engine."""

    async def results() -> dict[str, Any]:
        async with trial_of(role) as trial:
            found = {name: await each(trial) for name, each in TRIALS.items()}
            return {**found, "gloo_loops": gloo_loops()}

    return asyncio.run(results())
