"""The prefix index against plain dictionaries, under random claims, predictions, starts and ends of workers."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.claims import ClaimChange
from tests.examples import examples
from tests.pure.control_plane.prefix_index.small_index import HALF_LIFE_S, WORKERS, keys, matched


class IndexMachine(RuleBasedStateMachine):
    """Random claims, starts and ends of workers, predictions; beside it a dictionary for each worker and tier."""

    numbers = st.lists(st.integers(1, 30), unique=True, max_size=12)

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(4096, HALF_LIFE_S)
        self.generations = dict.fromkeys(WORKERS, 0)
        self.held: dict[str, list[set[int]]] = {}
        self.predicted: list[tuple[str, float, list[int]]] = []
        self.now_s = 0.0

    @rule(worker=st.sampled_from(WORKERS))
    def join(self, worker: str) -> None:
        self.generations[worker] += 1
        self.index.join(worker, self.generations[worker])
        self.index.join(worker, self.generations[worker])
        self._forget(worker)
        self.held[worker] = [set(), set()]

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: str) -> None:
        self.index.leave(worker)
        self._forget(worker)
        self.held.pop(worker, None)

    @rule(worker=st.sampled_from(WORKERS), stored=numbers, removed=numbers, on_device=st.booleans())
    def apply(self, worker: str, stored: list[int], removed: list[int], on_device: bool) -> None:
        removed = [number for number in removed if number not in stored]
        pair = (keys(*stored), keys(*removed))
        change = ClaimChange(*pair) if on_device else ClaimChange(host_stored=pair[0], host_removed=pair[1])
        self.index.apply(worker, change)
        if worker in self.held:
            tier = self.held[worker][0 if on_device else 1]
            tier -= set(removed)
            tier |= set(stored)

    @rule(worker=st.sampled_from(WORKERS), on_device=numbers, in_host=numbers)
    def replace(self, worker: str, on_device: list[int], in_host: list[int]) -> None:
        self.index.replace(worker, keys(*on_device), keys(*in_host))
        if worker in self.held:
            self._forget(worker)
            self.held[worker] = [set(on_device), set(in_host)]

    @rule(worker=st.sampled_from(WORKERS), prompt=numbers, for_s=st.floats(0.1, 5))
    def predict(self, worker: str, prompt: list[int], for_s: float) -> None:
        self.index.predict(worker, keys(*prompt), self.now_s + for_s)
        if worker in self.held and prompt:
            self.predicted.append((worker, self.now_s + for_s, prompt))

    @rule(passed_s=st.floats(10, 20))
    def all_predictions_end(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.index.expire(self.now_s)
        self.predicted = []

    @rule()
    def compact(self) -> None:
        # By itself it runs after thousands of sets.
        self.index._compact()

    @rule(prompt=numbers)
    def accessed(self, prompt: list[int]) -> None:
        self.index.accessed(keys(*prompt), self.now_s)

    @rule(prompt=numbers)
    def lookup(self, prompt: list[int]) -> None:
        """Every chunk is made known first, so that none is taken for one that had to give way."""
        self.index.accessed(keys(*prompt), self.now_s)
        for worker, tiers in self.held.items():
            gone = keys(*(number for number in prompt if number not in tiers[0]))
            self.index.apply(worker, ClaimChange(device_removed=gone))
        for worker, tiers in self.held.items():
            warm = tiers[0] | {each for name, _, sent in self.predicted if name == worker for each in sent}
            expected = tuple(_reach(prompt, among) for among in (tiers[0], warm, warm | tiers[1]))
            assert matched(self.index, worker, keys(*prompt)) == expected

    @invariant()
    def claims_are_what_was_claimed(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_invariants()
        assert self.index.workers == sorted(self.held)
        for worker, tiers in self.held.items():
            found = self.index.claims(worker)
            for tier, expected in zip(found, tiers, strict=True):
                assert set(tier.tolist()) == set(keys(*expected).tolist())

    def _forget(self, worker: str) -> None:
        self.predicted = [each for each in self.predicted if each[0] != worker]


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = examples(60, steps=40)


def _reach(prompt: list[int], among: set[int]) -> int:
    return next((place for place, number in enumerate(prompt) if number not in among), len(prompt))
