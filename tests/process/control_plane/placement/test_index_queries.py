"""What operators ask of index and placement, over the router's admin service and fake engines.

The claims of the fake engines go to the router's index directly instead of through Redis.
"""

from typing import Any

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import unix_ms
from control_plane.access.tenant_limits import TenantLimits
from control_plane.placement.decision_log import Explanation
from control_plane.prefix_index.claim_following import FeedCounts
from control_plane.prefix_index.redis_index import IndexHealth, WorkerFeedHealth
from kv_transfer.blocks import Tier
from kv_transfer.claims.prefix_chunks import PackedPrompt, short_name
from tests.fakes.answers import completion_of, field_of
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, until
from tests.fakes.indexed_cluster import CHUNK, PROMPT, access, cache, index_of, keys_of
from tests.pure.control_plane.placement.left_behind import left_behind


def text_prompt(text: str) -> generation.PromptInput:
    return generation.PromptInput(text=text)


async def lookup(cluster: Cluster, text: str, salt: str = "") -> admin.LookupPrefixResponse:
    return await cluster.admin.LookupPrefix(admin.LookupPrefixRequest(prompt=text_prompt(text), cache_salt=salt))


async def explain(cluster: Cluster, **fields: Any) -> admin.ExplainPlacementResponse:
    return await cluster.admin.ExplainPlacement(admin.ExplainPlacementRequest(**fields))


async def test_the_hottest_prefixes_are_told_with_who_holds_them_and_not_more_than_asked_for(cluster: Cluster) -> None:
    cache(named(cluster, "prefill-0"), PROMPT)
    cache(named(cluster, "prefill-1"), PROMPT, tier=Tier.HOST)
    access(cluster, PROMPT, 3)
    access(cluster, "something else, which is asked for once")

    hottest = (await cluster.admin.GetHottestPrefixes(admin.GetHottestPrefixesRequest(at_most=2))).prefixes
    one = (await cluster.admin.GetHottestPrefixes(admin.GetHottestPrefixesRequest(at_most=1))).prefixes

    chunks = len(PROMPT) // CHUNK
    assert [(each.name, each.tokens) for each in hottest] == [
        (short_name(int(keys_of(PROMPT)[-1])), chunks * CHUNK),
        (short_name(int(keys_of("something else, which is asked for once")[-1])), CHUNK),
    ]
    assert hottest[0].requests_per_s == pytest.approx(3 * hottest[1].requests_per_s, rel=0.05)
    assert (list(hottest[0].device_workers), list(hottest[0].host_workers)) == (["prefill-0"], ["prefill-1"])
    assert [each.name for each in one] == [hottest[0].name]


async def test_a_prompt_is_looked_up_on_every_worker_by_tier_and_each_pool_says_whom_it_would_choose(
    cluster: Cluster,
) -> None:
    cache(named(cluster, "prefill-1"), PROMPT[:96])
    cache(named(cluster, "prefill-1"), PROMPT, tier=Tier.HOST)
    index_of(cluster).predict("decode-0", keys_of(PROMPT)[:2], until_s=1e12)
    access(cluster, PROMPT[:CHUNK])

    found = await lookup(cluster, PROMPT)

    chunks = len(PROMPT) // CHUNK
    assert (found.prompt_tokens, found.chunks, found.chunk_tokens) == (len(PROMPT), chunks, CHUNK)
    assert found.first_requests_per_s > found.whole_requests_per_s
    assert {
        each.worker_id: (each.device_tokens, each.predicted_tokens, each.host_tokens, each.in_index)
        for each in found.workers
    } == {
        "decode-0": (0, 64, 0, True),
        "prefill-0": (0, 0, 0, True),
        "prefill-1": (96, 0, (chunks - 3) * CHUNK, True),
    }
    assert [(each.pool, each.worker_id, each.policy, each.equals) for each in found.choices] == [
        (PREFILL, "prefill-1", "hotness", 1),
        (DECODE, "decode-0", "hotness", 1),
    ]


async def test_another_salt_finds_nothing_of_a_tenants_prompt(cluster: Cluster) -> None:
    cache(named(cluster, "prefill-0"), PROMPT, "tenant")

    with_salt, without = await lookup(cluster, PROMPT, "tenant"), await lookup(cluster, PROMPT)

    assert [each.device_tokens for each in with_salt.workers] == [0, len(PROMPT) // CHUNK * CHUNK, 0]
    assert [each.device_tokens for each in without.workers] == [0, 0, 0]


async def test_a_prompt_shorter_than_a_chunk_is_no_mistake(cluster: Cluster) -> None:
    found = await lookup(cluster, "short")

    assert (found.prompt_tokens, found.chunks, found.first_requests_per_s) == (5, 0, 0.0)
    assert len(found.choices) == 2


async def test_a_worker_of_another_start_than_the_index_follows_is_told_as_not_in_it(cluster: Cluster) -> None:
    record = named(cluster, "prefill-0").record
    restarted = wire.WorkerRegistration.FromString(record.SerializeToString())
    restarted.generation = 7
    index_of(cluster).join("prefill-0", 1)
    await cluster.register(restarted)
    index_of(cluster).join("prefill-0", 3)

    found = {each.worker_id: each for each in (await lookup(cluster, PROMPT)).workers}

    assert (found["prefill-0"].generation, found["prefill-0"].in_index) == (7, False)
    assert found["prefill-1"].in_index


@pytest.mark.parametrize(
    ("text", "salt", "code", "field"),
    [
        ("", "", grpc.StatusCode.INVALID_ARGUMENT, "prompt.text"),
        ("x" * 600, "", grpc.StatusCode.OUT_OF_RANGE, "prompt"),
        ("text", "s" * 129, grpc.StatusCode.INVALID_ARGUMENT, "cache_salt"),
        ("text", "a\nb", grpc.StatusCode.INVALID_ARGUMENT, "cache_salt"),
    ],
)
async def test_what_generate_would_refuse_is_refused_with_the_field(
    cluster: Cluster, text: str, salt: str, code: grpc.StatusCode, field: str
) -> None:
    supposed = admin.SupposedRequest(prompt=text_prompt(text), cache_salt=salt)

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await lookup(cluster, text, salt)
    with pytest.raises(grpc.aio.AioRpcError) as refused_too:
        await explain(cluster, supposed=supposed)

    assert (refused.value.code(), field_of(refused.value)) == (code, field)
    assert (refused_too.value.code(), field_of(refused_too.value)) == (code, field)


async def test_the_placement_of_a_request_is_explained_with_every_candidate_and_the_winner(cluster: Cluster) -> None:
    cache(named(cluster, "prefill-1"), PROMPT[:128])

    route = completion_of(await cluster.generate(PROMPT, request_id="mine")).route
    told = await explain(cluster, request_id="mine")

    assert (told.request_id, route.prefill_worker_id) == ("mine", "prefill-1")
    prefill, decode = told.decisions
    assert (prefill.pool, prefill.worker_id, prefill.policy, prefill.load_only) == (
        PREFILL, "prefill-1", "hotness", False,
    )  # fmt: skip
    assert (prefill.prompt_tokens, prefill.max_tokens) == (len(PROMPT), 8)
    assert [(each.worker_id, each.passed, each.device_tokens) for each in prefill.candidates] == [
        ("prefill-1", True, 128),
        ("prefill-0", True, 0),
    ]
    for decision in told.decisions:
        for candidate in decision.candidates:
            assert all(0.0 <= value <= 1.0 for value in candidate.terms.values())
            weighed = sum(term.weight * candidate.terms[term.name] for term in decision.terms)
            assert candidate.score == pytest.approx(weighed)
    assert prefill.candidates[0].score > prefill.candidates[1].score
    assert (decode.worker_id, decode.equals) == (route.decode_worker_id, 1)
    assert told.disaggregation in ("remote_sooner", "long_remainder")
    assert told.prices.remainder_tokens == len(PROMPT)


async def test_a_request_that_failed_on_a_worker_is_explained_with_both_attempts(cluster: Cluster) -> None:
    cache(named(cluster, "prefill-1"), PROMPT)
    await named(cluster, "prefill-1").crash()

    route = completion_of(await cluster.generate(PROMPT, request_id="twice", max_tokens=1)).route
    told = await explain(cluster, request_id="twice")

    assert route.prefill_worker_id == "prefill-0"
    assert [decision.worker_id for decision in told.decisions] == ["prefill-1", "prefill-0"]


async def test_a_request_that_is_not_remembered_is_told_with_the_latest_that_are(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="`gone`; this router has not placed any yet"):
        await explain(cluster, request_id="gone")
    for number in range(7):
        await cluster.generate(request_id=f"r{number}", max_tokens=1)

    with pytest.raises(grpc.aio.AioRpcError, match="the last 7 that this router placed") as no:
        await explain(cluster, request_id="gone")

    assert (no.value.details() or "").endswith("the latest are: r6, r5, r4, r3, r2")
    assert (no.value.code(), field_of(no.value)) == (grpc.StatusCode.NOT_FOUND, "request_id")
    with pytest.raises(grpc.aio.AioRpcError) as nothing:
        await explain(cluster)
    assert (nothing.value.code(), field_of(nothing.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "asked")


async def test_ids_of_any_length_and_script_do_not_break_the_sentence(cluster: Cluster) -> None:
    for number in range(5):
        await cluster.generate(request_id="\N{GRINNING FACE}" * 127 + str(number), max_tokens=1)

    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await explain(cluster, request_id="\N{GRINNING FACE}" * 128)
    with pytest.raises(grpc.aio.AioRpcError) as too_long:
        await explain(cluster, request_id="x" * 100_000)

    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert (too_long.value.code(), field_of(too_long.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")


async def test_questions_change_nothing(cluster: Cluster) -> None:
    await cluster.generate(PROMPT)
    await until(lambda: bool(index_of(cluster).hottest(1, unix_ms() / 1000)))
    before = remembered(cluster)

    for _ in range(3):
        supposed = admin.SupposedRequest(prompt=text_prompt(PROMPT), max_tokens=3)
        told = await explain(cluster, supposed=supposed)
        # Nobody holds it, so that a choice between equals is made.
        assert (await lookup(cluster, "unknown " * 12)).choices[0].equals == 2
        await cluster.admin.GetHottestPrefixes(admin.GetHottestPrefixesRequest(at_most=10))
        await cluster.admin.GetIndexStatus(admin.GetIndexStatusRequest())

    assert (told.request_id, [decision.max_tokens for decision in told.decisions]) == ("", [3, 3])
    assert told.disaggregation
    assert remembered(cluster) == before


async def test_what_is_supposed_is_supposed_of_whoever_asks(cluster: Cluster) -> None:
    placer, access = cluster.parts.placer, cluster.parts.queries.rules.access
    supposed, asked = placer.supposed, []

    def noted(prompt: PackedPrompt, max_tokens: int, adapter: str, tenant: str, weight: float) -> Explanation:
        asked.append((tenant, weight))
        return supposed(prompt, max_tokens, adapter, tenant, weight)

    placer.supposed = noted  # type: ignore[method-assign, assignment] # Whose it is shows nowhere else without keys.
    access.limits_of = lambda tenant: TenantLimits(weight=3.0)  # type: ignore[method-assign] # As a file would say.
    await lookup(cluster, PROMPT)
    await explain(cluster, supposed=admin.SupposedRequest(prompt=text_prompt(PROMPT)))
    assert asked == [("", 3.0)] * 2


def remembered(cluster: Cluster) -> dict[str, Any]:
    """All that a placement leaves behind in the router; a placer itself keeps nothing."""
    placer = cluster.parts.placer
    own = {name: repr(value) for name, value in vars(placer).items() if not name.startswith("_now")}
    return own | left_behind(placer, index_of(cluster), cluster.router.membership)


async def test_the_state_of_the_index_is_told_with_each_worker_and_the_counts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = (
        WorkerFeedHealth("decode-0", 3, 17, 2, in_sync=False, silent=False),
        WorkerFeedHealth("prefill-0", 4, 9, 0, in_sync=True, silent=True),
    )
    counts = FeedCounts(batches=26, keys=400, duplicates=1, held=5, gaps=2, resyncs=3, damaged=4)
    health = IndexHealth(connected=False, staleness_s=12.5, stale=True, workers=workers, counts=counts)
    # Redis is not there, so nothing in this cluster is followed.
    monkeypatch.setattr(cluster.parts.queries, "_health", lambda: health)
    cache(named(cluster, "prefill-0"), PROMPT)
    await cluster.generate(PROMPT)

    status = await cluster.admin.GetIndexStatus(admin.GetIndexStatusRequest())

    assert status.entries >= len(PROMPT) // CHUNK
    assert status.capacity_entries >= status.entries and status.bytes == 16 * status.capacity_entries
    assert (status.connected, status.staleness_s, status.stale, status.chunk_tokens) == (False, 12.5, True, CHUNK)
    assert [(each.worker_id, each.generation, each.sequence, each.lag_batches) for each in status.workers] == [
        ("decode-0", 3, 17, 2),
        ("prefill-0", 4, 9, 0),
    ]
    assert [(each.in_sync, each.silent) for each in status.workers] == [(False, False), (True, True)]
    assert (status.batches, status.keys, status.duplicates) == (26, 400, 1)
    assert (status.gaps, status.resyncs, status.damaged) == (2, 3, 4)
    assert sum(status.disaggregation.values()) == 1
