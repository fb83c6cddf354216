"""LoRA adapters of an engine: their KV is theirs alone, they stay while they are held, and leave for others."""

from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster_configs.schema import RachisConfig
from cluster_core.engine import Engine
from cluster_core.engine_jobs import Adapter, EngineJob, SessionMode
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import AdapterNotLoadedError
from fault_sim.blocks.engine import BlockEngine
from kv_transfer.claims.prefix_chunks import chunk_keys, root_key
from tests.contract.conftest import make_job, outputs_of

pytestmark = pytest.mark.usefixtures("computes")

CHUNK_TOKENS = RachisConfig().index.chunk_tokens


def prompt(seed: int) -> tuple[int, ...]:
    return tuple((token * 7 + seed) % 251 for token in range(2 * CHUNK_TOKENS + 10))


async def answer(engine: Engine, job: EngineJob) -> tuple[list[int], int]:
    """Its tokens, and how many of its prompt were cached."""
    async with engine.holding(job.adapter) as digest:
        if job.adapter is not None:
            job = replace(job, adapter=replace(job.adapter, digest=digest))
        outputs = await outputs_of(engine, job)
    return [token for output in outputs for token in output.token_ids], outputs[0].cached_tokens


async def test_an_adapter_changes_the_answer_and_its_kv_is_its_own(engine: Engine, adapters: list[Adapter]) -> None:
    asked = [None, adapters[0], adapters[1]]
    answers = []
    for adapter in asked:
        first, cached = await answer(engine, replace(make_job(8, prompt=prompt(1)), adapter=adapter))
        assert cached == 0, "the KV of another is not its own"
        again, cached = await answer(engine, replace(make_job(8, prompt=prompt(1)), adapter=adapter))
        assert (again, cached > 0) == (first, True)
        answers.append(tuple(first))
    assert len(set(answers)) == 3


async def test_chunks_of_an_adapter_are_told_by_its_digest(engine: Engine, adapters: list[Adapter]) -> None:
    async with engine.holding(adapters[0]) as digest:
        await answer(engine, replace(make_job(1, prompt=prompt(2)), adapter=adapters[0]))
    of_the_adapter = set(chunk_keys(prompt(2), root_key("", "", digest), CHUNK_TOKENS).tolist())
    of_the_model = set(chunk_keys(prompt(2), root_key("", ""), CHUNK_TOKENS).tolist())
    assert len(of_the_adapter) == 2
    claims = (await engine.prefix_claims()).device
    assert of_the_adapter <= claims
    assert not of_the_model & claims


async def test_a_session_of_an_adapter_has_the_answer_of_its_whole_prompt(
    engine: Engine, adapters: list[Adapter]
) -> None:
    whole = prompt(3)
    async with engine.holding(adapters[0]) as digest:
        adapter = replace(adapters[0], digest=digest)
        session = engine.open_session(replace(make_job(1, prompt=whole[:50]), adapter=adapter), SessionMode.UPDATE)
        session.update(whole[:70] + whole[:10])
        session.update(whole[:100])
        outputs = [output async for output in session.finish(whole[100:])]
    expected, _ = await answer(engine, replace(make_job(1, prompt=whole), adapter=adapters[0]))
    assert [token for output in outputs for token in output.token_ids] == expected


async def test_the_one_that_was_held_longest_ago_leaves_for_another(
    started: tuple[Engine, EngineInfo], engine: Engine, adapters: list[Adapter]
) -> None:
    assert started[1].max_adapters == 2
    digests = []
    for adapter in (*adapters[:3], adapters[1]):
        async with engine.holding(adapter) as digest:
            digests.append(digest)
    assert digests[3] == digests[1]
    assert list(engine.adapters()) == [digests[2], digests[1]]
    async with engine.holding(adapters[3]) as digest:
        assert list(engine.adapters()) == [digests[1], digest]


async def test_what_is_held_stays(engine: Engine, adapters: list[Adapter]) -> None:
    async with AsyncExitStack() as held:
        digests = [await held.enter_async_context(engine.holding(adapter)) for adapter in adapters[:2]]
        with pytest.raises(AdapterNotLoadedError, match="adapter `a2` has no place: requests use all 2"):
            async with engine.holding(adapters[2]):
                raise AssertionError("it has a place")
        assert not await engine.unload_adapter(digests[0])
        assert sorted(engine.adapters()) == sorted(digests)
    assert await engine.unload_adapter(digests[0])
    assert list(engine.adapters()) == [digests[1]]
    assert not await engine.unload_adapter(digests[0])


async def test_what_is_no_adapter_or_another_than_it_was_is_not_loaded(engine: Engine, adapters: list[Adapter]) -> None:
    before = list(engine.adapters())
    for adapter, why in (
        (Adapter("none", "/no/such/folder"), "there is no adapter at /no/such/folder"),
        (replace(adapters[3], digest="other"), "holds another adapter than `a3` was"),
    ):
        with pytest.raises(AdapterNotLoadedError, match=why):
            async with engine.holding(adapter):
                raise AssertionError("it is loaded")
    assert list(engine.adapters()) == before


async def test_one_that_turns_out_to_be_none_costs_nobody_its_place(
    engine: Engine, adapters: list[Adapter], broken_adapter: Adapter
) -> None:
    async with engine.holding(adapters[0]) as digest:
        job = replace(make_job(4, prompt=prompt(4)), adapter=replace(adapters[0], digest=digest))
        before = [output.token_ids for output in await outputs_of(engine, job)]
        for _ in range(2):
            with pytest.raises(AdapterNotLoadedError):
                async with engine.holding(broken_adapter):
                    raise AssertionError("it is loaded")
        async with engine.holding(adapters[1]):
            assert len(engine.adapters()) == 2
        with gone(adapters[0].path):
            # An engine that had given up its place would look for its files.
            again = replace(job, request_id="again", cache_salt="" if isinstance(engine, BlockEngine) else "apart")
            assert [output.token_ids for output in await outputs_of(engine, again)] == before


@contextmanager
def gone(path: str) -> Iterator[None]:
    """There is no such folder for a while."""
    if not Path(path).exists():
        yield
        return
    away = Path(path).rename(f"{path}.away")
    yield
    away.rename(path)
