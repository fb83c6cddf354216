"""Workers in a line each, those that need looking at first, and pools as their sums: bounded whatever their number."""

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.overview.rows import pool_sums, worker_rows

PREFILL, DECODE = wire.POOL_PREFILL, wire.POOL_DECODE


def view(name: str, pool: wire.Pool.ValueType = DECODE, **load: int) -> admin.WorkerView:
    record = wire.WorkerRegistration(worker_id=name, pool=pool, state=wire.WORKER_STATE_READY)
    record.load.CopyFrom(wire.WorkerLoad(**load))
    return admin.WorkerView(registration=record, load=record.load)


def test_a_worker_that_needs_looking_at_comes_before_the_busiest() -> None:
    suspect, busy, idle = view("z"), view("b", running_requests=9), view("a")
    suspect.suspect = True
    assert [(row.worker_id, row.state) for row in worker_rows([busy, idle, suspect])] == [
        ("z", "suspect"), ("b", "ready"), ("a", "ready"),
    ]  # fmt: skip


def test_what_keeps_requests_from_a_worker_comes_before_what_it_says_of_itself() -> None:
    hangs, other = view("a"), view("b")
    hangs.registration.load.stalled_s = hangs.load.stalled_s = 12.0
    other.version_skew, other.suspect = "vLLM 1 here, 2 there", True
    states = {row.worker_id: (row.state, row.detail) for row in worker_rows([hangs, other])}
    assert states == {
        "a": ("hangs", "gets no requests: its engine has been in one step, command or copy for 12 s"),
        "b": ("other_version", "gets no requests: vLLM 1 here, 2 there"),
    }


def test_a_starting_worker_says_what_it_does() -> None:
    starting = view("a")
    starting.registration.state, starting.registration.phase = wire.WORKER_STATE_STARTING, "loading the model"
    (row,) = worker_rows([starting])
    assert (row.state, row.detail) == ("starting", "loading the model")


def test_a_thousand_workers_are_a_few_sums() -> None:
    views = [view(f"decode-{n}", running_requests=2, free_blocks=10, total_blocks=100) for n in range(1000)]
    views[7].registration.state = wire.WORKER_STATE_DRAINING
    prefill, decode = pool_sums(
        [PREFILL, DECODE], worker_rows(views), [admin.PoolStatus(pool=DECODE, desired_workers=1000)]
    )
    assert dict(decode.workers) == {"ready": 999, "draining": 1}
    assert (decode.running_requests, decode.free_blocks, decode.total_blocks) == (2000, 10_000, 100_000)
    assert decode.desired_workers == 1000 and not prefill.HasField("desired_workers") and not prefill.workers
