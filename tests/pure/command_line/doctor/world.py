"""A service that is well, as `rachis doctor` sees it, and defects that are planted into it, one at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import LoadedConfig, load
from cluster_core.versions import Versions
from command_line.doctor.checks import CHECKS
from command_line.doctor.findings import Finding, examine
from command_line.doctor.seen import Comparison, Disk, Part, Probe, Seen

PREFILL, DECODE = wire.POOL_PREFILL, wire.POOL_DECODE
# As metrics have it.
INTERACTIVE, BEST_EFFORT = ("class", "interactive"), ("class", "best_effort")
NOW_S = 1_800_000_000.0
GIB = 1 << 30
DAY_S = 86_400.0
TWO_OF_EACH: Mapping[str, Any] = {"pools.prefill.workers": 2, "pools.decode.workers": 2}

Plant = Callable[[Seen], Seen]


@dataclass(frozen=True, slots=True)
class Planted:
    """A defect, and the one finding that it comes to. says: a part of the sentence."""

    check: str
    plant: Plant
    subject: str
    says: str


def healthy() -> Seen:
    """Two workers of each pool on two hosts, with everything seen and nothing wrong."""
    config = _loaded()
    workers = [_worker(pool, number) for pool in (PREFILL, DECODE) for number in range(2)]
    return Seen(
        now_unix_s=NOW_S,
        here=Versions(rachis="0.1.0"),
        router=_router(),
        workers=workers,
        config=config.config,
        sources={entry.key: entry.source for entry in config.entries},
        pools=[_pool(PREFILL), _pool(DECODE)],
        index=_index(workers),
        claims=[
            admin.WorkerCheck(worker_id=each.registration.worker_id, device=admin.TierCheck(agreed=40))
            for each in workers
        ],
        metrics={
            ("rachis_request_ttft_seconds_count", frozenset({INTERACTIVE})): 400.0,
            ("rachis_request_ttft_seconds_bucket", frozenset({INTERACTIVE, ("le", "5.0")})): 395.0,
            ("rachis_traces_dropped_total", frozenset({("reason", "queue")})): 0.0,
        },
        certificate_ends_s=NOW_S + 90 * DAY_S,
        disks=[Disk("logs", "/tmp", 50 * GIB, 100 * GIB)],
        probes=[probe(), probe(cached=576)],
        comparisons=[Comparison(577, "decode-1", True, None), Comparison(7, "decode-1", True, None)],
    )


def probe(
    cached: int = 0,
    handoff: generation.HandoffOutcome.ValueType = generation.HANDOFF_OUTCOME_PULLED,
    reason: str = "long_remainder",
    prefill: str = "prefill-0",
) -> Probe:
    route = generation.Route(prefill_worker_id=prefill, decode_worker_id="decode-0", handoff=handoff)
    return Probe(577, generation.Completion(usage=generation.Usage(cached_tokens=cached), route=route), reason)


def found(seen: Seen) -> list[Finding]:
    return list(examine(CHECKS, seen).findings)


def configured(**flags: Any) -> Plant:
    """These keys are set; `a__b=1` sets `a.b`."""
    loaded = load(flags={**TWO_OF_EACH, **{name.replace("__", "."): value for name, value in flags.items()}})
    sources = {entry.key: entry.source for entry in loaded.entries}
    return lambda seen: replace(seen, config=loaded.config, sources=sources)


def worker(name: str, **fields: Any) -> Plant:
    """The view of that worker has these fields; `a__b=1` sets `a.b`."""
    return lambda seen: replace(
        seen,
        workers=[
            changed(view, **fields) if view.registration.worker_id == name else changed(view) for view in seen.workers
        ],
    )


def again(name: str, **fields: Any) -> Plant:
    """The second look is as the first, but for these fields of that worker."""

    def looked(seen: Seen) -> Seen:
        return replace(seen, later=worker(name, **fields)(seen).workers)

    return looked


def left(name: str) -> Plant:
    """The second look does not find that worker any more."""
    return lambda seen: replace(seen, later=[view for view in seen.workers if view.registration.worker_id != name])


def router(**fields: Any) -> Plant:
    return lambda seen: replace(seen, router=changed(seen.router, **fields))


def index(**fields: Any) -> Plant:
    return lambda seen: replace(seen, index=changed(seen.index, **fields))


def missing(part: Part, why: str = "not reached") -> Plant:
    return lambda seen: seen.without(part, why)


def both(*plants: Plant) -> Plant:
    def all_of_them(seen: Seen) -> Seen:
        for plant in plants:
            seen = plant(seen)
        return seen

    return all_of_them


def changed(message: Any, **fields: Any) -> Any:
    """A copy with these fields; an own message for a field replaces it."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        *path, last = name.split("__")
        owner = copy
        for step in path:
            owner = getattr(owner, step)
        if isinstance(value, list):
            owner.ClearField(last)
            getattr(owner, last).extend(value)
        elif isinstance(value, dict):
            owner.ClearField(last)
            getattr(owner, last).update(value)
        elif value is None:
            owner.ClearField(last)
        else:
            setattr(owner, last, value)
    return copy


@cache
def _loaded() -> LoadedConfig:
    return load(flags=TWO_OF_EACH)


def _router() -> admin.GetRouterStatusResponse:
    return admin.GetRouterStatusResponse(
        version="0.1.0",
        service_id="svc-1",
        uptime_s=3600,
        outcomes={"finished": 400, "cancelled": 20, "failed": 1},
        registry_connected=True,
        memory=[
            admin.MemoryUse(
                what="prompts", used_bytes=GIB // 2, limit_bytes=GIB, limit="router.max_prompt_mib"
            ),
            # Full by design: it holds the latest.
            admin.MemoryUse(what="traces", used_bytes=GIB, limit_bytes=GIB, limit="tracing.memory_mib"),
        ],
    )  # fmt: skip


def _worker(pool: wire.Pool.ValueType, number: int) -> admin.WorkerView:
    name = f"{'prefill' if pool == PREFILL else 'decode'}-{number}"
    record = wire.WorkerRegistration(
        worker_id=name,
        generation=number + 1,
        pool=pool,
        state=wire.WORKER_STATE_READY,
        address=f"10.0.0.{number}:{20_000 + pool}",
        node=f"h{number}",
        model=wire.ModelInfo(name="m", vocabulary_size=256, max_model_len=4096, dtype="float32"),
        block_size_tokens=32,
        max_running_requests=64,
        clock_ahead_ms=-3,
        cacheable_requests=90,
        stored_blocks=400,
        costs=wire.WorkerCosts(pull_s=0.01, pull_s_per_token=1e-4),
    )
    counters = wire.WorkerCounters(
        requests=100, handoffs_pulled=100 if pool == DECODE else 0, node_memory_bytes=64 * GIB,
        node_available_bytes=40 * GIB,
    )  # fmt: skip
    load = wire.WorkerLoad(total_blocks=1024, free_blocks=1000, total_host_blocks=256, free_host_blocks=200)
    tiers = wire.TierReport(host_capacity_blocks=256)
    return admin.WorkerView(registration=record, load=load, counters=counters, tiers=tiers)


def _pool(pool: wire.Pool.ValueType) -> admin.PoolStatus:
    return admin.PoolStatus(pool=pool, desired_workers=2, minimum_workers=2, ready_workers=2)


def _index(workers: list[admin.WorkerView]) -> admin.GetIndexStatusResponse:
    return admin.GetIndexStatusResponse(
        entries=100,
        capacity_entries=1 << 20,
        chunk_tokens=128,
        connected=True,
        workers=[
            admin.WorkerFeedStatus(worker_id=each.registration.worker_id, generation=1, in_sync=True)
            for each in workers
        ],
        disaggregation={"long_remainder": 100, "short_remainder": 300},
    )
