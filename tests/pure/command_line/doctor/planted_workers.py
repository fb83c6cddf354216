"""Defects of workers and pools."""

from dataclasses import replace

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.versions import Versions
from command_line.doctor.seen import Seen
from tests.pure.command_line.doctor.world import (
    DECODE,
    GIB,
    PREFILL,
    Plant,
    Planted,
    again,
    both,
    changed,
    configured,
    left,
    router,
    worker,
)

ALL = ("prefill-0", "prefill-1", "decode-0", "decode-1")
DRAINING = wire.WORKER_STATE_DRAINING


def without_a_pool(pool: wire.Pool.ValueType) -> Plant:
    return lambda seen: replace(seen, workers=[view for view in seen.workers if view.registration.pool != pool])


def all_drain(pool: str) -> Plant:
    return both(*(worker(f"{pool}-{number}", registration__state=DRAINING) for number in range(2)))


def does_both(seen: Seen) -> Seen:
    """A service of the two decode workers, which prefill as well, under other names."""
    shared = [
        changed(view, registration__pool=wire.POOL_SHARED, registration__worker_id=f"shared-{number}")
        for number, view in enumerate(seen.workers[2:])
    ]
    sizes = {"pools__prefill__workers": 0, "pools__decode__workers": 0, "pools__shared__workers": 2}
    status = admin.PoolStatus(pool=wire.POOL_SHARED, desired_workers=2, minimum_workers=2, ready_workers=2)
    return configured(**sizes)(replace(seen, workers=shared, pools=[status]))


def short(seen: Seen) -> Seen:
    waits = admin.PoolWorker(worker_id="decode-1", phase=admin.POOL_PHASE_PENDING, detail="no node has a GPU free")
    status = admin.PoolStatus(pool=DECODE, desired_workers=2, minimum_workers=2, ready_workers=1, workers=[waits])
    return replace(seen, pools=[seen.pools[0], status])


def none_ready(seen: Seen) -> Seen:
    return replace(seen, pools=[seen.pools[0], changed(seen.pools[1], ready_workers=0)])


def full_host(seen: Seen) -> Seen:
    return worker("decode-1", counters__node_available_bytes=2 * GIB)(
        worker("prefill-1", counters__node_available_bytes=2 * GIB)(seen)
    )


PLANTED = (
    Planted("decode_pool", all_drain("decode"), "decode", "decode-0 is draining, decode-1 is draining"),
    Planted("prefill_pool", all_drain("prefill"), "prefill", "decode workers compute every prompt themselves"),
    Planted("prefill_pool", without_a_pool(PREFILL), "prefill", "there is none"),
    Planted("shared_pool", both(does_both, all_drain("shared")), "shared", "shared-0 is draining, shared-1 is"),
    Planted("shared_pool", both(does_both, without_a_pool(wire.POOL_SHARED)), "shared", "there is none"),
    Planted("pool_size", short, "decode", "has 1 ready workers and needs 2 (decode-1: no node has a GPU free)"),
    Planted("worker_lost", worker("decode-1", load=None), "decode-1", "does not answer at 10.0.0.1:20002"),
    Planted("worker_lost", worker("prefill-1", suspect=True), "prefill-1", "a call to it has failed"),
    Planted(
        "worker_hangs",
        worker("decode-1", load__stalled_s=12.3),
        "decode-1",
        "has been in one step, command or copy for 12 s",
    ),
    Planted(
        "worker_hangs",
        worker("decode-1", load=None, registration__load__stalled_s=70),
        "decode-1",
        "has been in one step, command or copy for 70 s",
    ),
    Planted("worker_drains", worker("decode-1", registration__state=DRAINING), "decode-1", "until it is resumed"),
    Planted(
        "worker_drains",
        both(worker("decode-1", registration__state=DRAINING), again("decode-1")),
        "decode-1",
        "until it is resumed",
    ),
    Planted("worker_versions", worker("decode-1", version_skew="vLLM is 1 there and 2 here"), "decode-1", "vLLM is 1"),
    Planted(
        "command_version",
        lambda seen: replace(seen, here=Versions(rachis="0.2.3")),
        "rachis doctor",
        "Rachis is 0.2.3 on this host and 0.1.0 on the router's",
    ),
    Planted("clocks", worker("decode-1", registration__clock_ahead_ms=73_000), "decode-1", "73 s ahead of Redis's"),
    Planted("clocks", worker("decode-1", registration__clock_ahead_ms=-11_000), "decode-1", "11 s behind Redis's"),
    Planted("models", worker("decode-1", registration__model__dtype="bfloat16"), "workers", "decode-1 has the precis"),
    Planted("models", worker("decode-1", registration__block_size_tokens=64), "workers", "has blocks of 64"),
    Planted(
        "addresses",
        worker("decode-1", registration__address="127.0.0.1:20002"),
        "decode-1",
        "which workers on other hosts cannot reach",
    ),
    Planted("addresses", configured(pools__ports="20000-20001"), "decode-0", "outside of pools.ports 20000-20001"),
    Planted("quarantine", worker("decode-1", load__quarantined_blocks=31), "decode-1", "keeps 31 blocks from use"),
    Planted("host_memory", full_host, "h1", "2048 MiB of memory left, 3% of what it has"),
    Planted(
        "index_blocks",
        both(*(worker(name, registration__block_size_tokens=48) for name in ALL)),
        "prefill-0",
        "chunks of 144 tokens and the index knows chunks of 128",
    ),
)  # fmt: skip

# What an operator does on purpose, and what another finding tells already.
WELL = {
    "a worker that drains and still has something to do": worker(
        "decode-1", registration__state=DRAINING, load__active_calls=1
    ),
    "a drained worker that does not answer: its registration is about to end": worker(
        "decode-1", registration__state=DRAINING, load=None
    ),
    "a drained worker that has left since": both(worker("decode-1", registration__state=DRAINING), left("decode-1")),
    "a drained worker that has begun anew since": both(
        worker("decode-1", registration__state=DRAINING), again("decode-1", registration__generation=99),
    ),
    "a pool without a worker is told once": both(all_drain("decode"), none_ready),
    "a clock that is a few seconds off": worker("decode-1", registration__clock_ahead_ms=-9_000),
    "a patch release": router(version="0.1.7"),
    "one host, where workers may listen on loopback": both(
        *(
            worker(name, registration__address="127.0.0.1:20001", registration__node="h0")
            for name in ALL
        )
    ),
    "workers that do both, without any others": does_both,
    "a pool that is meant to be empty": both(
        configured(pools__prefill__workers=0), without_a_pool(PREFILL),
    ),
}  # fmt: skip
TELLS = {"a pool without a worker is told once": "decode_pool"}
