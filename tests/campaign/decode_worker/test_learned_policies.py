"""What the two policies that learn make of engines made up of two lines."""

from random import Random

import pytest

from decode_worker.stop_policies import (
    POLICIES,
    Action,
    AlwaysAdd,
    BatchState,
    Decision,
    PolicySettings,
    StopPolicy,
)

ADD, STOP = Action.ADD, Action.STOP
LEARNED = ("bandit", "q_learning")
# As published: the reward of the batch that was formed, and a choice for each decision.
AT_ONCE = PolicySettings(horizon_batches=1)


def made(name: str, seed: int = 0, settings: PolicySettings | None = None) -> StopPolicy:
    return POLICIES[name](settings or PolicySettings(), Random(seed))


# What is learned on an engine with a step time.


class Engine:
    """A cohort leads for `TURN` steps, and a request or so of its prefix comes with each; others wait without end.

    Who is admitted decodes for `LIFE` steps. Once somebody else was admitted nothing is shared any more, so all others
    are free, until the next cohort leads. Time of a step: 10 ms, and for each request the KV that it reads: `shared_ms`
    in a batch of one prefix, `mixed_ms` in any other.
    """

    TURN = 30
    BACKLOG = 16
    LIFE = 5, 15
    ROOM = 64

    def __init__(self, policy: StopPolicy, shared_ms: float, mixed_ms: float, seed: int = 1) -> None:
        self.policy = policy
        self.shared_ms, self.mixed_ms = shared_ms, mixed_ms
        self._rng = Random(seed)
        self._own: list[int] = []
        self._others: list[int] = []
        self._own_waiting = 0
        self._mixed = False
        self._decisions: list[Decision] = []
        self._executed: tuple[list[Decision], float] | None = None

    def run(self, steps: int) -> float:
        """Tokens per second."""
        tokens, seconds = 0, 0.0
        for step in range(steps):
            turn = step % self.TURN == 0
            self._mixed = self._mixed and not turn
            self._own_waiting += self.BACKLOG if turn else self._rng.randint(1, 3)
            self._admit()
            batch = max(1, self._batch)
            per_request_ms = self.mixed_ms if self._others else self.shared_ms
            step_s = (10 + batch * per_request_ms) / 1000 * self._rng.uniform(0.95, 1.05)
            self._executed, self._decisions = (self._decisions, batch / step_s), []
            self._own = [each - 1 for each in self._own if each > 1]
            self._others = [each - 1 for each in self._others if each > 1]
            tokens, seconds = tokens + batch, seconds + step_s
        return tokens / seconds

    @property
    def _batch(self) -> int:
        return len(self._own) + len(self._others)

    def _admit(self) -> None:
        while self._batch < self.ROOM:
            own = self._own_waiting > 0
            seen = BatchState(self._batch, 0 if own or self._mixed else 54, 3 if own else 100)
            if self._executed is not None:
                self.policy.learn(*self._executed, seen)
                self._executed = None
            action = self.policy.decide(seen)
            self._decisions.append(Decision(seen, action))
            if action is STOP:
                return
            (self._own if own else self._others).append(self._rng.randint(*self.LIFE))
            self._own_waiting -= own
            self._mixed = self._mixed or not own


class NeverMix(AlwaysAdd):
    def decide(self, state: BatchState) -> Action:
        return STOP if state.loss_chunks and state.batch else ADD


SHARING_PAYS, SHARING_IS_NOTHING = (0.1, 2.0), (0.5, 0.5)


def best_of_fixed(step_times: tuple[float, float]) -> float:
    return max(Engine(each, *step_times).run(2000) for each in (AlwaysAdd("greedy"), NeverMix("never")))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize(("step_times", "share"), [(SHARING_PAYS, 0.8), (SHARING_IS_NOTHING, 0.98)])
def test_a_learned_policy_comes_close_to_the_better_of_always_and_never_mixing(
    name: str, step_times: tuple[float, float], share: float, seed: int
) -> None:
    """What is missing is the price of exploring: a batch that is mixed once takes as long as five hundred others."""
    engine = Engine(made(name, seed), *step_times, seed=seed)
    engine.run(4000)
    assert engine.run(8000) >= share * best_of_fixed(step_times)


@pytest.mark.parametrize("name", LEARNED)
def test_rewarded_at_once_no_policy_would_find_out_that_a_mixed_batch_has_to_shrink_first(name: str) -> None:
    """The control of the test before, and the reason for the horizon."""
    engine = Engine(made(name, settings=AT_ONCE), *SHARING_PAYS)
    engine.run(4000)
    assert engine.run(4000) <= 0.3 * best_of_fixed(SHARING_PAYS)


def test_the_made_up_engines_differ_enough_to_tell_the_policies_apart() -> None:
    for step_times, better, worse in [(SHARING_PAYS, NeverMix, AlwaysAdd), (SHARING_IS_NOTHING, AlwaysAdd, NeverMix)]:
        assert Engine(better(""), *step_times).run(1000) > 1.3 * Engine(worse(""), *step_times).run(1000)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize(
    ("before", "after", "share"), [(SHARING_PAYS, SHARING_IS_NOTHING, 0.95), (SHARING_IS_NOTHING, SHARING_PAYS, 0.6)]
)
def test_a_learned_policy_follows_traffic_that_changes(
    name: str, before: tuple[float, float], after: tuple[float, float], share: float
) -> None:
    engine = Engine(made(name, settings=PolicySettings(epsilon_min=0.01)), *before)
    engine.run(4000)
    engine.shared_ms, engine.mixed_ms = after
    engine.run(12_000)
    assert engine.run(8000) >= share * best_of_fixed(after)
