"""What a session that is open counts for: what those before it have asked for, in the time of each worker."""

import pytest
from rachis.v1 import worker_pb2 as wire

from control_plane.fleet.candidates import fixed_columns
from control_plane.model.worker_snapshot import WorkerSnapshot
from control_plane.placement.session_work import SessionWork


def of(*prompts: tuple[int, int]) -> SessionWork:
    """Tokens of each, and how many were found in a cache."""
    work = SessionWork()
    for tokens, cached in prompts:
        work = work.became_whole(tokens, cached)
    return work


def test_before_any_has_become_whole_a_session_counts_for_something() -> None:
    assert 0 < of().tokens < 10_000


def test_it_counts_for_what_the_last_ones_have_asked_for() -> None:
    assert of((200, 0)) == SessionWork(200, 20_000, 1)
    assert of((200, 0), (400, 0)) == SessionWork(300, 50_000, 2)
    last = of(*[(200, 0)] * 50, *[(600, 0)] * 100)
    assert last.tokens == pytest.approx(600, rel=0.01)
    assert last.became_whole(60_000, 0).tokens < 4000, "one that is huge decides nothing for long"


def test_what_a_session_has_found_in_a_cache_is_not_asked_for() -> None:
    assert of((1000, 900)) == SessionWork(100, (1_000_000 - 810_000) / 2, 1)
    assert of((1000, 2000)) == SessionWork(0, 0, 1)
    assert of((1000, -5)).tokens == 1000


def test_each_worker_takes_its_own_time() -> None:
    workers = [WorkerSnapshot(name, 1, wire.POOL_PREFILL, "") for name in ("a", "b", "c", "d")]  # type: ignore[arg-type]
    told = [
        wire.WorkerRegistration(costs=wire.WorkerCosts(prefill_s=0.5, prefill_s_per_token=1e-3)),
        wire.WorkerRegistration(costs=wire.WorkerCosts(prefill_s_per_token=5e-3, prefill_s_per_pair=1e-4)),
        # About as much as the first.
        wire.WorkerRegistration(costs=wire.WorkerCosts(prefill_s=0.5, prefill_s_per_token=2e-3)),
        wire.WorkerRegistration(costs=wire.WorkerCosts(prefill_s_per_token=1e-3)),
    ]
    seconds = of((100, 0)).prefill_s(fixed_columns(workers, told, told))
    assert seconds.tolist() == pytest.approx([0.6, 0.5 + 0.5, 0.6, 0.1])
