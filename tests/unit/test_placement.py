"""Which worker a request goes to."""

from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import worker_pb2 as wire

from cluster_core.ids import WorkerId
from control_plane.membership import WorkerSnapshot
from control_plane.placement import LEAST_LOADED, PlacementPolicy, PlacementRequest, load_score

REQUEST = PlacementRequest([1, 2, 3], 8)
GENERATION = 2


def worker(name: str, *, requests: int = 0, tokens: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(WorkerId(name), GENERATION, wire.POOL_DECODE, "", requests, tokens, 64)


snapshots = st.lists(
    st.builds(
        lambda index, requests, tokens: worker(f"w{index}", requests=requests, tokens=tokens if requests else 0),
        st.integers(0, 20),
        st.integers(0, 64),
        st.integers(0, 100_000),
    ),
    unique_by=lambda snapshot: snapshot.worker_id,
    max_size=8,
)


def chosen(candidates: list[WorkerSnapshot], *excluded: str) -> str | None:
    choice = LEAST_LOADED.choose(
        PlacementRequest([1], 1, frozenset((name, GENERATION) for name in excluded)), candidates
    )
    return choice.worker_id if choice else None


def test_the_worker_with_fewer_tokens_in_flight_is_chosen() -> None:
    assert chosen([worker("a", requests=1, tokens=500), worker("b", requests=1, tokens=20)]) == "b"


def test_many_small_requests_weigh_more_than_one_of_some_tokens() -> None:
    assert chosen([worker("a", requests=10, tokens=10), worker("b", requests=1, tokens=100)]) == "b"


def test_a_tie_goes_to_the_first_by_name_in_any_order() -> None:
    assert chosen([worker("b"), worker("a"), worker("c")]) == "a"


def test_an_excluded_worker_is_not_chosen_even_when_idle() -> None:
    assert chosen([worker("a"), worker("b", requests=9, tokens=9000)], "a") == "b"


def test_a_worker_that_came_back_under_a_new_generation_is_not_excluded() -> None:
    request = PlacementRequest([1], 1, frozenset({("a", GENERATION - 1)}))
    choice = LEAST_LOADED.choose(request, [worker("a")])
    assert choice is not None and choice.worker_id == "a"


def test_nothing_is_chosen_when_all_are_excluded_or_there_are_none() -> None:
    assert chosen([worker("a")], "a") is None
    assert chosen([]) is None


def test_weights_decide_between_scorers() -> None:
    def likes_b(_request: PlacementRequest, candidate: WorkerSnapshot) -> float:
        return float(candidate.worker_id == "b")

    candidates = [worker("a"), worker("b", requests=1, tokens=0)]

    assert PlacementPolicy((), ((load_score, 10.0), (likes_b, 1.0))).choose(REQUEST, candidates) == candidates[0]
    assert PlacementPolicy((), ((load_score, 0.1), (likes_b, 1.0))).choose(REQUEST, candidates) == candidates[1]


@given(snapshots)
def test_the_choice_is_never_more_loaded_than_another_candidate(candidates: list[WorkerSnapshot]) -> None:
    def load(candidate: WorkerSnapshot) -> int:
        return candidate.in_flight_tokens + 16 * candidate.in_flight_requests

    choice = LEAST_LOADED.choose(REQUEST, candidates)

    assert (choice is None) == (not candidates)
    assert choice is None or load(choice) == min(map(load, candidates))


@given(snapshots)
def test_scores_lie_between_zero_and_one(candidates: list[WorkerSnapshot]) -> None:
    assert all(0.0 <= load_score(REQUEST, candidate) <= 1.0 for candidate in candidates)
