"""What survives of an open session's prompt is told from the updates seen: by depth, by client, from the session."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_worker import survival as survival_estimates
from prefill_worker.survival import DEPTHS, Slice, SurvivalEstimates

LIST = 16_000


def play(estimates: SurvivalEstimates, client: str, kept: Sequence[int], name: str = "s", *, known: int = LIST) -> None:
    """A session that is updated as often, each time while it could be computed; its last update closes it."""
    estimates.opened(name, client, known)
    for each in kept:
        estimates.planned()
        estimates.updated(name, each, known)
    estimates.closed(name)
    estimates.check_invariants()


def survival(estimates: SurvivalEstimates, client: str, name: str = "new", known: int = LIST) -> list[float]:
    """By depth, of a session that was just opened."""
    estimates.opened(name, client, known)
    found = [each.survival for each in estimates.slices(name, 0, known)]
    estimates.forget(name)
    return found


def test_before_anything_was_seen_everything_is_believed_to_stay() -> None:
    estimates = SurvivalEstimates()
    assert survival(estimates, "client") == [1.0] * DEPTHS
    assert estimates.slices("unknown", 10, 30) == (Slice(30, 1.0),)


def test_what_updates_throw_away_is_not_believed_to_stay_and_what_they_keep_is() -> None:
    estimates = SurvivalEstimates()
    for _ in range(200):
        play(estimates, "client", [LIST // 2])
    found = survival(estimates, "client")
    assert min(found[: DEPTHS // 2]) > 0.95
    assert max(found[DEPTHS // 2 :]) < 0.1


def test_the_more_updates_are_to_come_the_less_survives_them_all() -> None:
    once, often = SurvivalEstimates(), SurvivalEstimates()
    for index in range(200):
        # Every other update keeps all, the others the first half.
        play(once, "client", [LIST if index % 2 else LIST // 2])
        play(often, "client", [LIST if (index + step) % 2 else LIST // 2 for step in range(8)])
    assert survival(once, "client")[-1] == pytest.approx(0.5, abs=0.1)
    assert survival(often, "client")[-1] < 0.2


def test_a_client_is_told_from_its_own_sessions_and_one_that_is_new_from_all() -> None:
    estimates = SurvivalEstimates()
    for _ in range(100):
        play(estimates, "keeps", [LIST])
        play(estimates, "throws", [0])
    keeps, throws, new = (survival(estimates, client)[-1] for client in ("keeps", "throws", "new"))
    assert keeps > 0.9
    assert throws < 0.1
    assert 0.3 < new < 0.7


def test_a_session_that_behaves_unlike_its_client_is_believed_more_with_each_update() -> None:
    estimates = SurvivalEstimates()
    for _ in range(100):
        play(estimates, "client", [LIST // 4] * 4)
    estimates.opened("odd", "client", LIST)
    found = []
    for _ in range(6):
        found.append(estimates.slices("odd", 0, LIST)[-1].survival)
        estimates.planned()
        estimates.updated("odd", LIST, LIST)
    assert found[1:] == sorted(found[1:])
    assert found[-1] > 3 * found[0]


def test_a_version_that_could_not_be_computed_is_no_version() -> None:
    burst, single = SurvivalEstimates(), SurvivalEstimates()
    for estimates, steps in ((burst, (LIST, LIST // 2, LIST, LIST)), (single, (LIST // 2,))):
        estimates.opened("s", "client", LIST)
        estimates.planned()
        for kept in steps:
            estimates.updated("s", kept, LIST)
        estimates.closed("s")
    assert survival(burst, "client") == survival(single, "client")


def test_a_short_prompt_before_the_first_list_says_little() -> None:
    estimates = SurvivalEstimates()
    for _ in range(100):
        estimates.opened("s", "client", 64)
        estimates.planned()
        estimates.updated("s", 64, LIST)
        estimates.planned()
        estimates.updated("s", 0, LIST)
        estimates.closed("s")
    assert survival(estimates, "client")[-1] < 0.1


def test_finish_without_an_update_keeps_all() -> None:
    estimates = SurvivalEstimates()
    for _ in range(100):
        play(estimates, "client", [0])
        estimates.opened("s", "client", LIST)
        estimates.planned()
        estimates.closed("s")
    assert survival(estimates, "client") == pytest.approx([0.5] * DEPTHS, abs=0.1)


def test_clients_that_were_not_seen_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    # A thousand, looked at after each of their sessions, would take a second.
    monkeypatch.setattr(survival_estimates, "MOST_CLIENTS", 100)
    estimates = SurvivalEstimates()
    for number in range(survival_estimates.MOST_CLIENTS + 1):
        play(estimates, str(number), [0])
        if number % 2 == 0:
            play(estimates, "often", [LIST])
    assert survival(estimates, "often")[-1] > 0.9
    estimates.check_invariants()


def test_sessions_that_are_closed_or_forgotten_are_gone() -> None:
    estimates = SurvivalEstimates()
    play(estimates, "client", [0])
    before = survival(estimates, "client")
    estimates.updated("s", LIST, LIST)
    estimates.closed("s")
    estimates.forget("s")
    assert survival(estimates, "client") == before
    assert estimates.survival("s", 0) == 1.0


def test_a_token_survives_as_its_slice_does() -> None:
    estimates = SurvivalEstimates()
    for _ in range(20):
        play(estimates, "client", [LIST // 2])
    estimates.opened("s", "client", LIST)
    first = 0
    for each in estimates.slices("s", 0, LIST + 100):
        assert estimates.survival("s", first) == each.survival
        first += each.tokens


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What happens, one after the other: (kind, kept, known) of one of three sessions."""
    kinds = st.sampled_from(("plan", "open", "update", "close", "forget"))
    return draw(st.lists(st.tuples(kinds, st.integers(0, 50), st.integers(0, 50)), max_size=60))


@given(story=stories(), first=st.integers(0, 60), tokens=st.integers(0, 60))
def test_slices_are_of_all_tokens_and_what_is_deeper_survives_no_longer(
    story: list[tuple[str, int, int]], first: int, tokens: int
) -> None:
    estimates, known_tokens = SurvivalEstimates(), {"s": -1}
    for kind, kept, known in story:
        if kind == "plan":
            estimates.planned()
        elif kind == "open":
            estimates.opened("s", "client", known)
            known_tokens["s"] = known
        elif kind == "close":
            estimates.closed("s")
            known_tokens["s"] = -1
        elif kind == "forget":
            estimates.forget("s")
            known_tokens["s"] = -1
        elif known_tokens["s"] >= 0:
            estimates.updated("s", min(kept, known_tokens["s"]), known)
            known_tokens["s"] = known
        estimates.check_invariants()
    slices = estimates.slices("s", first, tokens)
    assert sum(each.tokens for each in slices) == tokens
    chances = [each.survival for each in slices]
    assert chances == sorted(chances, reverse=True)
    assert all(0 <= each <= 1 for each in chances)
