"""When a pool that follows its load grows and shrinks."""

from hypothesis import given
from hypothesis import strategies as st

from cluster_configs.schema import AutoscaleSection
from control_plane.metrics.recent_ttft import RecentTtft
from control_plane.pools.autoscaling import Autoscaler, PoolSample

SETTINGS = AutoscaleSection(
    enabled=True,
    min_workers=1,
    max_workers=4,
    waiting_per_worker=4,
    grow_after_s=15,
    shrink_below=0.3,
    shrink_after_s=60,
)
OBJECTIVE_S = 2.0


def sample(
    workers: int = 2,
    waiting: int = 0,
    usage: float = 0.25,
    ttft_s: float | None = None,
    computing: float | None = None,
) -> PoolSample:
    """computing: as usage unless it is given."""
    return PoolSample(workers, workers, 0, waiting, usage, usage if computing is None else computing, ttft_s)


def decided(samples: list[tuple[float, PoolSample]]) -> list[int]:
    autoscaler = Autoscaler(SETTINGS, OBJECTIVE_S)
    return [autoscaler.decide(now_s, each) for now_s, each in samples]


def test_a_pool_grows_by_one_when_too_much_waits_for_long_enough() -> None:
    short = sample(waiting=9)
    assert decided([(0, short), (14.9, short), (15, short), (16, short)]) == [2, 2, 3, 2]


def test_a_missed_ttft_objective_is_reason_enough() -> None:
    for ttft_s, then in ((2.1, 3), (1.9, 2)):
        used = sample(usage=0.31, ttft_s=ttft_s)
        assert decided([(0, used), (15, used)]) == [2, then]


def test_a_pool_whose_workers_all_compute_is_in_use_however_few_places_of_its_batches_are_taken() -> None:
    """As one that does both is, by long prompts."""
    used = sample(usage=0.15, ttft_s=9.0, computing=1.0)
    assert decided([(0, used), (15, used)]) == [2, 3]


def test_what_an_idle_worker_takes_too_long_for_does_not_grow_a_pool_nor_shrink_it() -> None:
    idle = sample(usage=0.02, ttft_s=6.0)
    assert decided([(second, idle) for second in range(600)]) == [2] * 600


def test_a_moment_without_a_queue_starts_the_clock_anew() -> None:
    short, calm = sample(waiting=9), sample(waiting=8)
    assert decided([(0, short), (10, calm), (11, short), (25, short), (26, short)]) == [2, 2, 2, 2, 3]


def test_a_pool_shrinks_when_one_worker_less_would_have_been_enough_all_the_time() -> None:
    ample, fuller = sample(usage=0.15), sample(usage=0.16)
    assert decided([(0, ample), (59, ample), (60, ample)]) == [2, 2, 1]
    assert decided([(0, fuller), (60, fuller)]) == [2, 2]


def test_a_pool_that_waits_for_a_worker_does_not_grow() -> None:
    coming = PoolSample(desired=3, ready=2, coming=1, waiting=99, usage=1.0, computing=1.0)
    assert decided([(0, coming), (15, coming), (100, coming)]) == [3, 3, 3]


def test_a_worker_that_never_comes_is_given_up_when_nobody_needs_it() -> None:
    pending = PoolSample(desired=3, ready=2, coming=1, waiting=0, usage=0.2, computing=0.2)
    assert decided([(0, pending), (60, pending)]) == [3, 2]


def test_a_worker_that_was_taken_out_does_not_keep_its_pool_from_growing() -> None:
    drained = PoolSample(desired=3, ready=2, coming=0, waiting=99, usage=1.0, computing=1.0)
    assert decided([(0, drained), (15, drained)]) == [3, 4]


def test_the_bounds_hold_also_for_a_size_that_was_given_by_hand() -> None:
    assert decided([(0, sample(workers=9))]) == [4]
    assert decided([(0, sample(4, waiting=99)), (15, sample(4, waiting=99))]) == [4, 4]
    assert decided([(0, sample(1, usage=0.0)), (600, sample(1, usage=0.0))]) == [1, 1]


@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.integers(0, 40), st.floats(0, 1)), max_size=200),
    st.integers(1, 4),
)
def test_changes_are_single_steps_at_least_the_shorter_time_apart(
    history: list[tuple[float, int, float]], workers: int
) -> None:
    autoscaler, now_s, changed_s = Autoscaler(SETTINGS, OBJECTIVE_S), 0.0, -1e9
    for pause_s, waiting, usage in history:
        now_s += pause_s
        wanted = autoscaler.decide(now_s, sample(workers, waiting, usage))
        assert abs(wanted - workers) <= 1
        assert SETTINGS.min_workers <= wanted <= SETTINGS.max_workers
        if wanted != workers:
            assert now_s - changed_s >= SETTINGS.grow_after_s
            changed_s, workers = now_s, wanted


def test_recent_ttft_is_what_nine_in_ten_of_the_last_half_minute_kept() -> None:
    recent = RecentTtft()
    for second in range(4):
        recent.observe(second, 1.0)
    assert recent.kept_by_most(4) is None
    for _ in range(6):
        recent.observe(5, 2.0)
    recent.observe(5, 30.0)
    assert recent.kept_by_most(5) == 2.0
    assert recent.kept_by_most(60) is None


def test_recent_ttft_counts_those_after_a_moment_where_one_is_given() -> None:
    recent = RecentTtft()
    for second in range(10):
        recent.observe(second, 3.0 if second < 5 else 0.2)
    assert recent.kept_by_most(10) == 3.0
    assert recent.kept_by_most(10, since_s=4) == 0.2
    assert recent.kept_by_most(10, since_s=5) is None, "too few"
    for _ in range(20):
        recent.observe(12, 8.0, 0.5)
    assert recent.kept_by_most(12) == 4.0
    assert recent.kept_by_most(12, since_s=4) == 0.2, "who waited since before says nothing of it"
