"""Requests that name a LoRA adapter as their model, through the router and both workers over fake engines."""

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_core.engine_jobs import SamplingSpec
from control_plane.model.lifecycle import State
from tests.fakes.answers import text_of, tokens_of
from tests.fakes.cluster import Cluster, named, until
from tests.fakes.engine import expected_text

PATH = "/adapters/sql"
DIGEST = "digest-sql"
SAMPLING = SamplingSpec(max_tokens=8, temperature=0.0)


async def load(cluster: Cluster, name: str = "sql") -> None:
    cluster.fabric.adapters[PATH] = DIGEST
    await cluster.admin.LoadAdapter(admin.LoadAdapterRequest(name=name, path=PATH))


async def test_both_workers_compute_with_the_adapter_and_nobody_else_does(cluster: Cluster) -> None:
    await load(cluster)
    assert text_of(await cluster.generate(model="sql")) == expected_text(tuple(b"hello"), SAMPLING, f"\n{DIGEST}")
    assert text_of(await cluster.generate()) == expected_text(tuple(b"hello"), SAMPLING)
    assert text_of(await cluster.generate(model="fake")) == expected_text(tuple(b"hello"), SAMPLING)
    for name in ("prefill-0", "decode-0"):
        jobs = named(cluster, name).engine.jobs
        assert [job.adapter.name if job.adapter else None for job in jobs] == ["sql", None, None]


async def test_a_session_of_an_adapter(cluster: Cluster) -> None:
    await load(cluster)
    session = cluster.session()
    await session.open("he", "APPEND", model="sql", temperature=0.0, max_tokens=8)
    await session.append("ll")
    await session.finish("o")
    assert text_of(await session.answer()) == expected_text(tuple(b"hello"), SAMPLING, f"\n{DIGEST}")


async def test_a_model_that_is_not_served_is_refused_with_what_is(cluster: Cluster) -> None:
    await load(cluster)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await cluster.generate(model="other")
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == "model: unknown model `other`; this cluster serves `fake`, `sql`"
    await cluster.admin.UnloadAdapter(admin.UnloadAdapterRequest(name="sql"))
    with pytest.raises(grpc.aio.AioRpcError, match="unknown model `sql`"):
        await cluster.generate(model="sql")


async def test_a_worker_that_cannot_load_it_is_left_for_one_that_has_it_and_stays_usable(
    cluster_2x2: Cluster,
) -> None:
    cluster = cluster_2x2
    await load(cluster)
    first = named(cluster, "prefill-0").engine
    assert await first.unload_adapter(DIGEST)
    del cluster.fabric.adapters[PATH]
    assert text_of(await cluster.generate(model="sql")) == expected_text(tuple(b"hello"), SAMPLING, f"\n{DIGEST}")
    assert not any(member.is_suspect for member in cluster.router.membership.members())
    for worker in cluster.workers:
        await worker.engine.unload_adapter(DIGEST)
    with pytest.raises(grpc.aio.AioRpcError, match="there is no adapter at /adapters/sql") as raised:
        await cluster.generate(model="sql")
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await cluster.ends_with({State.FINISHED: 1, State.FAILED: 1})


async def test_an_answer_goes_on_with_its_own_adapter_or_not_at_all(cluster: Cluster) -> None:
    await load(cluster)
    whole = await cluster.generate(model="sql", max_tokens=8)
    assert [response.delta.adapter for response in whole if response.HasField("delta")][:2] == [DIGEST, ""]
    request = api.GenerateRequest(
        model="sql",
        prompt=generation.PromptInput(text="hello"),
        sampling=generation.SamplingParams(max_tokens=8, temperature=0.0),
    )
    had = tokens_of(whole)[:3]
    cluster.calls += 2
    for adapter, outcome in ((DIGEST, tokens_of(whole)[3:]), ("another", None)):
        received = api.ReceivedAnswer(token_ids=had, text_characters=3, adapter=adapter)
        call = cluster.api.Resume(api.ResumeRequest(request=request, received=[received]))
        if outcome is not None:
            assert tokens_of([response async for response in call]) == outcome
            continue
        with pytest.raises(grpc.aio.AioRpcError, match=r"received\[0\].adapter: the answer began with another adapter"):
            _ = [response async for response in call]


async def test_workers_tell_which_they_have_and_placement_prefers_those(cluster_2x2: Cluster) -> None:
    cluster = cluster_2x2
    await load(cluster)

    def loaded() -> set[str]:
        members = cluster.router.membership.members()
        return {member.worker_id for member in members if DIGEST in member.registration.adapters}

    await until(lambda: len(loaded()) == 4)
    worker = named(cluster, "prefill-0")
    await worker.engine.unload_adapter(DIGEST)
    del worker.record.adapters[:]
    cluster.registry.write(worker.record)
    await until(lambda: len(loaded()) == 3)
    await cluster.generate(model="sql")
    assert not worker.engine.jobs
    await cluster.generate()
    assert len(worker.engine.jobs) == 1
