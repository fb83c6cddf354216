"""Which decisions earn which reward, also where steps overlap."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.rewards import _MOST_CARRIED, FormedBatch, RewardLedger
from decode_worker.stop_policies import Action, AlwaysAdd, BatchState, Decision

Lesson = tuple[list[int], float, int | None]


@dataclass
class Pupil(AlwaysAdd):
    """Writes down what it is taught: the batch sizes of the decisions, the reward, that of the next state."""

    name: str = "pupil"
    learned: list[Lesson] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def learn(
        self, decisions: Sequence[Decision], tokens_per_s: float, next_state: BatchState | None, seconds: float = 1.0
    ) -> None:
        sizes = [each.state.batch for each in decisions]
        self.took_s.append(seconds)
        self.learned.append((sizes, tokens_per_s, None if next_state is None else next_state.batch))


def decided(*sizes: int) -> list[Decision]:
    return [Decision(BatchState(size, 1, 0), Action.ADD) for size in sizes]


def new() -> tuple[RewardLedger, list[Lesson]]:
    pupil = Pupil()
    return RewardLedger(pupil), pupil.learned


def test_decisions_are_rewarded_once_the_next_state_is_known() -> None:
    ledger, learned = new()
    ledger.executed(ledger.formed(decided(1, 2)), 100.0)
    assert learned == []
    ledger.formed(decided(3))
    assert learned == [([1, 2], 100.0, 3)]


def test_whoever_learns_hears_how_long_the_batch_took() -> None:
    pupil = Pupil()
    ledger = RewardLedger(pupil)
    ledger.executed(ledger.formed(decided(1)), 100.0, 0.25)
    ledger.formed([])
    assert pupil.took_s == [0.25]


def test_where_nothing_waited_there_is_no_next_state() -> None:
    ledger, learned = new()
    ledger.executed(ledger.formed(decided(1)), 100.0)
    ledger.formed([])
    assert learned == [([1], 100.0, None)]


def test_a_batch_without_decisions_is_told_as_well() -> None:
    ledger, learned = new()
    ledger.executed(ledger.formed([]), 100.0)
    ledger.formed(decided(1))
    assert learned == [([], 100.0, 1)]


def test_overlapping_steps_reward_the_decisions_of_their_own_batch() -> None:
    ledger, learned = new()
    first, second = ledger.formed(decided(1)), ledger.formed(decided(2))
    assert learned == []
    ledger.executed(first, 10.0)
    assert learned == [([1], 10.0, 2)]
    third = ledger.formed(decided(3))
    ledger.executed(second, 20.0)
    ledger.executed(third, 30.0)
    assert learned == [([1], 10.0, 2), ([2], 20.0, 3)]


def test_decisions_of_a_mixed_step_are_rewarded_with_the_next_that_only_decodes() -> None:
    ledger, learned = new()
    for decisions, reward in ((decided(1), None), ([], None), (decided(2), 50.0)):
        ledger.executed(ledger.formed(decisions), reward)
    ledger.formed(decided(3))
    assert learned == [([1, 2], 50.0, 3)]


def test_a_step_by_arrival_earns_nothing_and_ends_what_was_carried() -> None:
    ledger, learned = new()
    ledger.executed(ledger.formed(decided(1)), None)
    ledger.executed(ledger.formed([], by_arrival=True), 70.0)
    ledger.executed(ledger.formed(decided(2)), 80.0)
    ledger.formed([])
    assert learned == [([2], 80.0, None)]


def test_no_more_is_carried_than_the_bound() -> None:
    ledger, learned = new()
    for size in range(3 * _MOST_CARRIED):
        ledger.executed(ledger.formed(decided(size)), None)
    ledger.executed(ledger.formed([]), 10.0)
    ledger.formed([])
    assert learned == [(list(range(2 * _MOST_CARRIED, 3 * _MOST_CARRIED)), 10.0, None)]


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from((None, 1.0, 2.0)), st.sampled_from((False, False, True))), max_size=30
)


@given(STEPS, st.integers(1, 4))
def test_the_depth_of_the_pipeline_changes_no_lesson(steps: list[tuple[int, float | None, bool]], depth: int) -> None:
    def lessons(depth: int) -> list[Lesson]:
        ledger, learned = new()
        in_flight: deque[tuple[FormedBatch, float | None]] = deque()
        for number, (decisions, reward, by_arrival) in enumerate(steps):
            formed = [] if by_arrival else decided(*[number] * decisions)
            in_flight.append((ledger.formed(formed, by_arrival=by_arrival), reward))
            if len(in_flight) >= depth:
                ledger.executed(*in_flight.popleft())
        for _ in range(depth):
            ledger.formed([])
        for each in in_flight:
            ledger.executed(*each)
        # The number of batches that the ledger remembers is visible nowhere else.
        assert len(ledger._batches) <= 2 * depth
        return learned

    assert lessons(depth) == lessons(1)
