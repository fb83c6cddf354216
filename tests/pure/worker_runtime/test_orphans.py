"""A worker stays while it is kept or of use, and for a while after that."""

from worker_runtime.orphans import OrphanWatch


def test_it_is_an_orphan_once_nobody_has_kept_it_and_nothing_has_run_on_it_for_so_long() -> None:
    watch = OrphanWatch(60.0, now_s=0.0)
    assert not watch.looked(30.0, is_kept=True, is_idle=True)
    assert not watch.looked(89.0, is_kept=False, is_idle=True)
    assert watch.looked(90.0, is_kept=False, is_idle=True)


def test_work_and_a_service_that_comes_back_begin_the_time_anew() -> None:
    watch = OrphanWatch(60.0, now_s=0.0)
    assert not watch.looked(59.0, is_kept=False, is_idle=False)
    assert not watch.looked(118.0, is_kept=False, is_idle=True)
    assert not watch.looked(118.5, is_kept=True, is_idle=True)
    assert not watch.looked(178.0, is_kept=False, is_idle=True)
    assert watch.looked(178.5, is_kept=False, is_idle=True)
