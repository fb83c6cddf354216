"""Defects of a router and of what it follows."""

from collections.abc import Mapping
from dataclasses import replace

from rachis.v1 import admin_pb2 as admin

from command_line.doctor.seen import Seen
from tests.pure.command_line.doctor.planted_workers import ALL
from tests.pure.command_line.doctor.world import (
    BEST_EFFORT,
    GIB,
    INTERACTIVE,
    Plant,
    Planted,
    both,
    configured,
    index,
    router,
    worker,
)

PROMPTS = "router.max_prompt_mib"


def waiting(requests: int) -> Plant:
    return lambda seen: replace(seen, waiting_requests=requests)


def figures(changes: Mapping[tuple[str, frozenset[tuple[str, str]]], float]) -> Plant:
    return lambda seen: replace(seen, metrics={**seen.metrics, **changes})


def feed(name: str = "prefill-0", *, is_in_sync: bool = True, is_silent: bool = False, lag_batches: int = 0) -> Plant:
    status = admin.WorkerFeedStatus(worker_id=name, in_sync=is_in_sync, silent=is_silent, lag_batches=lag_batches)
    return index(workers=[status])


def untrue(seen: Seen) -> Seen:
    check = admin.WorkerCheck(worker_id="decode-0", host=admin.TierCheck(agreed=4, untrue=3))
    return replace(seen, claims=[*seen.claims[:2], check])


def cacheable(requests: int) -> Plant:
    return both(*(worker(name, registration__cacheable_requests=requests) for name in ALL))


PLANTED = (
    Planted("registry", router(registry_connected=False), "redis", "Redis does not answer the router"),
    Planted(
        "redis_memory",
        router(redis_memory__used_bytes=GIB - 1, redis_memory__limit_bytes=GIB, redis_memory__limit="maxmemory"),
        "redis",
        "Redis is 100% full, 1023 of 1024 MiB (maxmemory): once it is full",
    ),
    Planted("overload", router(queued_requests=256), "router", "queue is full with 256 requests"),
    Planted(
        "overload",
        router(memory=[admin.MemoryUse(used_bytes=GIB - 1, limit_bytes=GIB, limit=PROMPTS)]),
        PROMPTS,
        "prompts take 1023 of 1024 MiB",
    ),
    Planted("queue", waiting(17), "router", "17 requests wait for 4 workers"),
    Planted("poison", router(poisoned_requests=2), "router", "2 requests, by what they ask for, are refused"),
    Planted(
        "failures",
        router(outcomes={"finished": 100, "failed": 2, "expired": 3}),
        "router",
        "5 of 105 requests have failed or expired",
    ),
    Planted(
        "ttft",
        figures({("rachis_request_ttft_seconds_bucket", frozenset({INTERACTIVE, ("le", "5.0")})): 340.0}),
        "objectives.ttft_s",
        "15% of 400 requests have waited longer than 5 s",
    ),
    Planted(
        "ttft",
        both(
            configured(objectives__best_effort__ttft_s=60.0),
            figures(
                {
                    ("rachis_request_ttft_seconds_count", frozenset({BEST_EFFORT})): 200.0,
                    ("rachis_request_ttft_seconds_bucket", frozenset({BEST_EFFORT, ("le", "60.0")})): 150.0,
                }
            ),
        ),
        "objectives.ttft_s",
        "25% of 200 best-effort requests have waited longer than 60 s",
    ),
    Planted(
        "traces",
        both(
            configured(tracing__otlp_endpoint="http://127.0.0.1:4317"),
            figures({("rachis_traces_dropped_total", frozenset({("reason", "queue")})): 12.0}),
        ),
        "tracing.otlp_endpoint",
        "12 traces were dropped: http://127.0.0.1:4317 did not take them",
    ),
    Planted("index_stale", index(stale=True, staleness_s=14.2), "index", "the index is 14 s old and not believed"),
    Planted("index_away", index(connected=False), "redis", "the index stays as it is"),
    Planted("index_silent", feed(is_silent=True), "index", "finish requests and tell of no block: prefill-0"),
    Planted("index_sync", feed(is_in_sync=False), "index", "not in sync: prefill-0"),
    Planted("index_lag", feed(lag_batches=101), "prefill-0", "the index is 101 batches behind prefill-0"),
    Planted("index_damaged", index(damaged=1), "index", "1 batches or snapshots of workers could not be read"),
    Planted(
        "index_size", index(dropped=9, entries=800, capacity_entries=1000), "index.max_entries", "9 chunks for hotter"
    ),
    Planted("index_claims", untrue, "decode-0", "3 chunks of decode-0 that its engine does not hold"),
    Planted("index_unused", both(cacheable(0), index(entries=0)), "engine.block_size_tokens", "a block of 32 tokens"),
    Planted("index_unused", index(entries=0), "index.chunk_tokens", "of 400 requests none has filled a chunk of 128"),
)

WELL = {
    "Redis away, told once": both(router(registry_connected=False), index(connected=False)),
    "Redis that responses fill": router(redis_memory__used_bytes=90, redis_memory__limit_bytes=100),
    "a burst of requests": waiting(16),
    "a few failures of many requests": router(outcomes={"finished": 1000, "failed": 7}),
    "failures that are few": router(outcomes={"finished": 10, "failed": 4}),
    "a full index that has dropped nothing": index(entries=900, capacity_entries=1000),
    "an index that is empty because workers are silent": both(feed(is_silent=True), index(entries=0)),
    "few requests, all of them short": both(
        cacheable(0),
        index(entries=0),
        *(worker(name, counters__requests=20) for name in ALL),
    ),
    "slow first tokens of few requests": figures(
        {
            ("rachis_request_ttft_seconds_count", frozenset({INTERACTIVE})): 99.0,
            ("rachis_request_ttft_seconds_bucket", frozenset({INTERACTIVE, ("le", "5.0")})): 9.0,
        }
    ),
}
# Of these the one that tells them.
TELLS = {"Redis away, told once": "registry", "an index that is empty because workers are silent": "index_silent"}
