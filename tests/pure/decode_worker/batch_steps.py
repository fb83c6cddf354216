"""Decode batches played in steps: prompts with a symbol for each chunk, and a policy that is a threshold."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster_core.engine_reports import PolicyRow
from decode_worker.batch_members import Reason
from decode_worker.batching import Batching
from decode_worker.chunk_hashes import ChunkHash
from decode_worker.stop_policies import Action, BatchState, Decision, StopPolicy

BOUND_S = 4.0


def hashes_of(prompt: Sequence[Any]) -> list[ChunkHash]:
    """One chunk for each symbol."""
    hashes, value = [], 0
    for symbol in prompt:
        value = hash((value, symbol))
        hashes.append(value)
    return list(hashes)


@dataclass
class Threshold:
    """Takes what costs at most so many chunks."""

    most_loss_chunks: int = 0
    name: str = "threshold"
    asked: list[BatchState] = field(default_factory=list)

    def decide(self, state: BatchState) -> Action:
        self.asked.append(state)
        return Action.ADD if state.loss_chunks <= self.most_loss_chunks else Action.STOP

    def learn(
        self, decisions: Sequence[Decision], tokens_per_s: float, next_state: BatchState | None, seconds: float = 1.0
    ) -> None:
        return

    def table(self) -> Sequence[PolicyRow]:
        return ()

    def dump(self) -> Any:
        return None

    def load(self, dumped: Any) -> None:
        return


class Batch:
    """Steps of half a second, in which each request is admitted that was planned."""

    STEP_S = 0.5

    def __init__(self, policy: StopPolicy | None = None, places: int = 4, **more: Any) -> None:
        self.policy = policy if policy is not None else Threshold()
        self.batching = Batching(self.policy, BOUND_S, **more)
        self.places = places
        self.now_s = 0.0
        self.running: list[str] = []
        self.pulled: set[str] = set()

    def arrive(self, *prompts: str, **more: Any) -> None:
        """A letter is a chunk; the prompt, or what stands before its dot, gives the request its name."""
        for prompt in prompts:
            self.batching.insert(prompt, hashes_of(prompt.partition(".")[0]), self.now_s, **more)

    def step(self, *, by_arrival: bool = False) -> list[tuple[str, Reason]]:
        plan = self.batching.plan(self.now_s, self.places - len(self.running), by_arrival=by_arrival)
        names = plan.request_ids
        self.batching.settle(plan, names, self.pulled & set(names), self.now_s)
        self.running += names
        self.now_s += self.STEP_S
        return [(each.member.request_id, each.reason) for each in plan.joining]

    def names(self, **more: Any) -> list[str]:
        return [name for name, _ in self.step(**more)]

    def end(self, *names: str) -> None:
        for name in names:
            self.running.remove(name)
            assert self.batching.gone(name)

    def tip(self) -> int:
        return self.batching.tree.tip_chunks


def admit(batching: Batching, now_s: float, places: int) -> list[str]:
    """Who joins: everybody who was planned."""
    plan = batching.plan(now_s, places)
    batching.settle(plan, plan.request_ids, (), now_s)
    return plan.request_ids
