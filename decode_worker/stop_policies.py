"""When a batch stops growing although requests wait: one class for each policy, a table names them.

Source: FEATHER section 4.3. Before each admission the scheduler asks: ADD the candidate, or STOP until the next step.
    fcfs, greedy    always ADD; they differ in the order of the candidates, which is the scheduler's matter
    heuristic       fixed thresholds on what the shared prefix loses (4.3.2)
    bandit          the better mean reward, with an upper confidence bound (4.3.3)
    q_learning      the better discounted future reward (4.3.4)
Reward and learned values: decode tokens per second of the batch that the decisions formed.

A free admission (no loss, or into an empty batch) is no question: every policy takes it. So where nothing is shared
nobody stops, and nothing is spent on exploring. Elsewhere ADD, then STOP, is tried once before values are compared.
What exploring costs: a STOP one step, but an ADD mixes the batch for as long as that request decodes, hundreds of
steps. The defaults explore about once in a thousand decisions in the long run.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import log, sqrt
from random import Random
from typing import Any, Protocol

from cluster_core.engine import PolicyRow
from decode_worker.policy_store import Bins, LearnedValues, Value, bins_of, entries, is_number


class Action(StrEnum):
    ADD = "add"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class BatchState:
    """Before a decision. batch: requests in it. loss_chunks: what the candidate takes from the prefix that all share.
    peers: other waiting requests with the prefix that would be left."""

    batch: int
    loss_chunks: int
    peers: int


@dataclass(frozen=True, slots=True)
class Decision:
    state: BatchState
    action: Action


class StopPolicy(Protocol):
    name: str

    def decide(self, state: BatchState) -> Action: ...

    def learn(self, decisions: Sequence[Decision], tokens_per_s: float, next_state: BatchState | None) -> None:
        """decisions: in their order, those that formed the batch. tokens_per_s: of decoding it, finite.
        next_state: the first that was seen afterwards; None: nothing waited."""

    def table(self) -> Sequence[PolicyRow]:
        """What was learned, for people; empty for a policy that does not learn."""

    def dump(self) -> Any:
        """The same for `load`, as JSON takes it; None for a policy that does not learn."""

    def load(self, dumped: Any) -> None:
        """Raises ValueError for what `dump` cannot have given; nothing is changed then."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """heuristic: batches of fewer than small_batch take any loss, others up to loss_threshold_chunks, or
    relaxed_threshold_chunks where at least many_peers would share the prefix that is left.
    bandit: exploration is c over rewards scaled to at most 1 (published: 200 on raw ones of about 4,000);
    memory_batches: after so many batches in a state, what was seen there counts 1/e.
    q_learning: learning rate alpha, discount gamma a step, and the share of random decisions: from epsilon, times
    epsilon_decay with each decision that is a question, to epsilon_min.
    """

    small_batch: int = 4
    loss_threshold_chunks: int = 1
    relaxed_threshold_chunks: int = 2
    many_peers: int = 8
    horizon_batches: int = 32
    exploration: float = 0.1
    memory_batches: int = 2000
    alpha: float = 0.1
    gamma: float = 0.9
    epsilon: float = 1.0
    epsilon_decay: float = 0.98
    epsilon_min: float = 0.002


ORDER = [Action.ADD, Action.STOP]


class _LearnsNothing:
    def __init__(self, name: str) -> None:
        self.name = name

    def learn(self, decisions: Sequence[Decision], tokens_per_s: float, next_state: BatchState | None) -> None:
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


class _Learner:
    """What the two policies share that keep a table."""

    name: str

    def __init__(self, horizon_batches: int) -> None:
        self._learned = LearnedValues()
        self._horizon_batches = horizon_batches
        self._batches = 0
        # For each state the action that is kept there, and from which batch on it may change.
        self._kept_actions: dict[Bins, tuple[Action, int]] = {}

    def decide(self, state: BatchState) -> Action:
        if _is_free(state):
            return Action.ADD
        bins = _bins(state)
        action, until = self._kept_actions.get(bins, (Action.ADD, 0))
        if self._batches >= until:
            known = self._learned.of(bins)
            action = next((each for each in ORDER if each not in known), None) or self._choose(known)
            self._kept_actions[bins] = action, self._batches + self._horizon_batches
        return action

    def _choose(self, known: Mapping[str, Value]) -> Action:
        """Between two that were both tried."""
        raise NotImplementedError

    def table(self) -> Sequence[PolicyRow]:
        return self._learned.rows()

    def dump(self) -> Any:
        return {"values": self._learned.dump()}

    def load(self, dumped: Any) -> None:
        self._learned = LearnedValues.loaded(entries(dumped, "values")["values"])


class Bandit(_Learner):
    """Discounted UCB (Garivier and Moulines, ALT 2011): what was seen in a state fades, so that values follow the
    traffic and the worse action is tried again now and then. Equal decisions of one batch share one reward, so they
    count once. Rewards are scaled by the greater of the two means, so that c has no unit."""

    name = "bandit"

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings.horizon_batches)
        self._pending = deque()
        self._total = 0.0
        self._exploration = settings.exploration
        self._kept = 1 - 1 / settings.memory_batches

    def _choose(self, known: Mapping[str, Value]) -> Action:
        return max(Action, key=lambda action: _upper_bound(known, action, self._exploration))

    def learn(self, decisions: Sequence[Decision], tokens_per_s: float, next_state: BatchState | None) -> None:
        self._batches += 1
        formed = dict.fromkeys((_bins(each.state), each.action) for each in decisions)
        self._pending.append((formed, self._total))
        self._total += tokens_per_s
        if len(self._pending) >= self._horizon_batches:
            formed, before = self._pending.popleft()
            for bins, action in formed:
                self._learned.fade(bins, self._kept)
                self._learned.add(bins, action, (self._total - before) / self._horizon_batches)


class QLearning(_Learner):
    """Q(s, a): what the engine will yield from here on, each step counting gamma times the one before.

    The rule as printed rewards every ADD with a step's throughput. But no time passes between two decisions of one
    batch: that would pay the reward once for each admission, and ADD would win whatever it does to the batch. So this
    is a semi-Markov process: Q of a decision becomes the greatest Q of the next one in the same step, undiscounted, and
    only the last earns the reward: (1 - gamma) r + gamma max Q(next state), or r alone where there is no such state or
    nothing is known of it. With 1 - gamma, values stay in tokens per second.
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

    def learn(self, decisions: Sequence[Decision], tokens_per_s: float, next_state: BatchState | None) -> None:
        self._batches += 1
        gamma = self._settings.gamma
        following = self._learned.of(_bins(next_state)) if next_state is not None else None
        target = (1 - gamma) * tokens_per_s + gamma * _greatest(following) if following else tokens_per_s
        for each in reversed(decisions):
            bins = _bins(each.state)
            self._learned.add(bins, each.action, target, kept=1 - self._settings.alpha)
            target = _greatest(self._learned.of(bins))

    def dump(self) -> Any:
        return {**super().dump(), "epsilon": self._epsilon}

    def load(self, dumped: Any) -> None:
        given = entries(dumped, "values", "epsilon")
        if not is_number(given["epsilon"]) or given["epsilon"] > 1:
            raise ValueError(f"epsilon is a number from 0 to 1, not {given['epsilon']!r:.80}")
        self._learned = LearnedValues.loaded(given["values"])
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
