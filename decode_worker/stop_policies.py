"""When a batch stops growing although requests wait: one class for each policy, a table names them.

Source: FEATHER section 4.3. Before each admission a policy decides: ADD the candidate, or STOP until the next step.
    fcfs, greedy    always ADD; they differ in the order of the candidates, which is the scheduler's matter
    heuristic       fixed thresholds on what the shared prefix loses (4.3.2)
    bandit          the better mean reward, with an upper confidence bound (4.3.3)
    q_learning      the better discounted future reward (4.3.4)
Reward and learned values: decode tokens per second of the batch that the decisions formed.

Free admissions (no loss, or an empty batch) are no question: every policy takes them. So where nothing is shared no
policy stops or explores.

What the paper does not need: it forms each batch anew, ours carry over. So one STOP in a mixed batch shows nothing, and
a policy that is rewarded at once never learns that many in a row pay; a learner keeps its choice for `horizon_batches`.
And an exploring ADD mixes the batch while that request decodes, so it has to be rare: once in thousands of batches.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import log, sqrt
from random import Random
from typing import Any, Protocol

from cluster_core.engine_reports import PolicyRow
from decode_worker.learned_values import Bins, LearnedValues, Value, bins_of, entries, is_number


class Action(StrEnum):
    ADD = "add"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class BatchState:
    """Before a decision."""

    # Requests in the batch.
    batch: int
    # What the candidate takes from the prefix that all share.
    loss_chunks: int
    # Other waiting requests with the prefix that would be left.
    peers: int


@dataclass(frozen=True, slots=True)
class Decision:
    state: BatchState
    action: Action


class StopPolicy(Protocol):
    name: str

    def decide(self, state: BatchState) -> Action: ...

    def learn(
        self,
        decisions: Sequence[Decision],
        tokens_per_s: float,
        next_state: BatchState | None,
        seconds: float = 1.0,
    ) -> None:
        """After each executed batch. decisions: in their order, those that formed it, if any. tokens_per_s: of decoding
        it, finite. next_state: the first that was seen afterwards; None: nothing waited. seconds: that it took, above
        0: what is noticed late makes one batch look slow and the next one fast."""

    def table(self) -> Sequence[PolicyRow]:
        """What was learned, for people; empty for a policy that does not learn."""

    def dump(self) -> Any:
        """The same for `load`, as JSON takes it; None for a policy that does not learn."""

    def load(self, dumped: Any) -> None:
        """Raises ValueError for what `dump` cannot have given; nothing is changed then."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Of the heuristic, of both that learn, of the bandit, and of Q-learning."""

    # Batches of fewer requests take any loss.
    small_batch: int = 4
    # Others up to this one, or to the relaxed one where at least so many peers would share the prefix that is left.
    loss_threshold_chunks: int = 1
    relaxed_threshold_chunks: int = 2
    many_peers: int = 8
    # How long an action is kept in its state, and of how many batches the bandit's reward is the throughput; 1 is the
    # published rule.
    horizon_batches: int = 16
    # c over rewards scaled to at most 1 (published: 200 on raw ones of about 4,000).
    exploration: float = 0.1
    # After so many rewards in a state, what was seen there counts 1/e.
    memory_batches: int = 4000
    # The learning rate, and the discount a batch.
    alpha: float = 0.1
    gamma: float = 0.9
    # The share of random choices: from here, times the decay with each choice, to the least. How fast Q-learning
    # follows the traffic is up to the least.
    epsilon: float = 1.0
    epsilon_decay: float = 0.95
    epsilon_min: float = 0.005


class _LearnsNothing:
    def __init__(self, name: str) -> None:
        self.name = name

    def learn(
        self,
        decisions: Sequence[Decision],
        tokens_per_s: float,
        next_state: BatchState | None,
        seconds: float = 1.0,
    ) -> None:
        return

    def table(self) -> Sequence[PolicyRow]:
        return ()

    def dump(self) -> Any:
        return None

    def load(self, dumped: Any) -> None:
        if dumped is not None:
            raise ValueError(f"policy {self.name} learns nothing, so there is nothing to load")


class AlwaysAdd(_LearnsNothing):
    def decide(self, state: BatchState) -> Action:
        return Action.ADD


class Heuristic(_LearnsNothing):
    def __init__(self, settings: PolicySettings) -> None:
        super().__init__("heuristic")
        self._settings = settings

    def decide(self, state: BatchState) -> Action:
        its = self._settings
        many = state.peers >= its.many_peers
        threshold = its.relaxed_threshold_chunks if many else its.loss_threshold_chunks
        takes = _is_free(state) or state.batch < its.small_batch or state.loss_chunks <= threshold
        return Action.ADD if takes else Action.STOP


def _is_free(state: BatchState) -> bool:
    return state.batch == 0 or state.loss_chunks == 0


def _bins(state: BatchState) -> Bins:
    return bins_of(state.batch, state.loss_chunks, state.peers)


class _Learner(ABC):
    """What the two policies share that keep a table. What was never tried in a state goes first, ADD before STOP."""

    name: str

    def __init__(self, horizon_batches: int) -> None:
        self._learned = LearnedValues()
        self._horizon_batches = horizon_batches
        self._batches = 0
        # In each state the action, and how many batches there have to be before it may change.
        self._chosen: dict[Bins, tuple[Action, int]] = {}

    def decide(self, state: BatchState) -> Action:
        if _is_free(state):
            return Action.ADD
        bins = _bins(state)
        action, until = self._chosen.get(bins, (Action.ADD, 0))
        if self._batches >= until:
            known = self._learned.of(bins)
            action = next((each for each in Action if each not in known), None) or self._choose(known)
            self._chosen[bins] = action, self._batches + self._horizon_batches
        return action

    @abstractmethod
    def _choose(self, known: Mapping[str, Value]) -> Action:
        """Between two that were both tried."""

    def table(self) -> Sequence[PolicyRow]:
        return self._learned.rows()

    def dump(self) -> Any:
        return {"values": self._learned.dump()}

    def load(self, dumped: Any) -> None:
        self._take(LearnedValues.loaded(entries(dumped, "values")["values"]))

    def _take(self, learned: LearnedValues) -> None:
        self._learned = learned
        self._chosen.clear()


class Bandit(_Learner):
    """Discounted UCB (Garivier and Moulines, ALT 2011): what was seen in a state fades, so that values follow the
    traffic and the worse action is tried again now and then. Equal decisions of one batch share one reward, so they
    count once. Rewards are scaled by the greater of the two means, so that c has no unit."""

    name = "bandit"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings.horizon_batches)
        self._exploration = settings.exploration
        self._kept = 1 - 1 / settings.memory_batches
        # Of the batches of the last horizon what formed each, its tokens and its seconds.
        self._recent: deque[tuple[list[tuple[Bins, Action]], float, float]] = deque()

    def _choose(self, known: Mapping[str, Value]) -> Action:
        return max(Action, key=lambda action: _upper_bound(known, action, self._exploration))

    def learn(
        self,
        decisions: Sequence[Decision],
        tokens_per_s: float,
        next_state: BatchState | None,
        seconds: float = 1.0,
    ) -> None:
        self._batches += 1
        formed = list(dict.fromkeys((_bins(each.state), each.action) for each in decisions))
        self._recent.append((formed, tokens_per_s * seconds, seconds))
        if len(self._recent) < self._horizon_batches:
            return
        reward = sum(tokens for _, tokens, _ in self._recent) / sum(took_s for _, _, took_s in self._recent)
        for bins, action in self._recent.popleft()[0]:
            self._learned.fade(bins, self._kept)
            self._learned.add(bins, action, reward)


class QLearning(_Learner):
    """Q(s, a): what the engine will yield from here on, each batch counting gamma times the one before.

    The rule as printed rewards every ADD with a batch's throughput. But no time passes between two decisions of one
    batch: that would pay the reward once for each admission, and ADD would win whatever it does to the batch. So this
    is a semi-Markov process: Q of a decision becomes the greatest Q of the next one in the same batch, undiscounted,
    and only the last earns the reward: (1 - gamma) r + gamma max Q(next state), or r alone where there is no such state
    or nothing is known of it. With 1 - gamma, values stay in tokens per second. The first of them are plain means, the
    newest weighs alpha in the long run; and more for an action that has not been taken for long.
    """

    name = "q_learning"

    def __init__(self, settings: PolicySettings, rng: Random) -> None:
        super().__init__(settings.horizon_batches)
        self._settings = settings
        self._rng = rng
        self._epsilon = settings.epsilon

    def _choose(self, known: Mapping[str, Value]) -> Action:
        explores = self._rng.random() < self._epsilon
        self._epsilon = max(self._settings.epsilon_min, self._epsilon * self._settings.epsilon_decay)
        return self._rng.choice(list(Action)) if explores else max(Action, key=lambda action: known[action].mean)

    def learn(
        self,
        decisions: Sequence[Decision],
        tokens_per_s: float,
        next_state: BatchState | None,
        seconds: float = 1.0,
    ) -> None:
        self._batches += 1
        gamma = self._settings.gamma
        following = self._learned.of(_bins(next_state)) if next_state is not None else None
        target = (1 - gamma) * tokens_per_s + gamma * _greatest(following) if following else tokens_per_s
        for each in reversed(decisions):
            bins = _bins(each.state)
            self._learned.fade(bins, 1 - self._settings.alpha)
            self._learned.add(bins, each.action, target)
            target = _greatest(self._learned.of(bins))

    def dump(self) -> Any:
        return {**super().dump(), "epsilon": self._epsilon}

    def load(self, dumped: Any) -> None:
        given = entries(dumped, "values", "epsilon")
        if not is_number(given["epsilon"]) or given["epsilon"] > 1:
            raise ValueError(f"epsilon is a number from 0 to 1, not {given['epsilon']!r:.80}")
        self._take(LearnedValues.loaded(given["values"]))
        self._epsilon = float(given["epsilon"])


POLICIES: Mapping[str, Callable[[PolicySettings, Random], StopPolicy]] = {
    "fcfs": lambda settings, rng: AlwaysAdd("fcfs"),
    "greedy": lambda settings, rng: AlwaysAdd("greedy"),
    "heuristic": lambda settings, rng: Heuristic(settings),
    "bandit": lambda settings, rng: Bandit(settings),
    "q_learning": QLearning,
}


def _upper_bound(known: Mapping[str, Value], action: Action, exploration: float) -> float:
    """mean / greatest mean + c sqrt(ln S / n); n: weight of the action, S: of both."""
    scale = _greatest(known) or 1.0
    total = max(1.0, sum(each.weight for each in known.values()))
    return known[action].mean / scale + exploration * sqrt(log(total) / known[action].weight)


def _greatest(known: Mapping[str, Value]) -> float:
    return max(each.mean for each in known.values())
