"""What `rachis bench roles` asks for, and what it makes of what came."""

from collections import Counter

import pytest

from benchmarks.roles import LONG_ANSWERS, LONG_PROMPTS, PHASES, Kind, PhaseTally, Shift, arrivals, report

SHIFT = Shift({LONG_PROMPTS: Kind(200, 4, 5.0), LONG_ANSWERS: Kind(4, 90, 2.0)}, 100.0)


def test_in_each_phase_its_kind_comes_often_and_the_other_one_seldom() -> None:
    found = arrivals(SHIFT, 100)

    counts = Counter((each.phase, each.answer_tokens) for each in found)
    for phase, often in enumerate(PHASES):
        for name, kind in SHIFT.kinds.items():
            wanted = kind.per_s * 100 * (1.0 if name == often else 0.1)
            assert counts[phase, kind.answer_tokens] == pytest.approx(wanted, abs=4 * wanted**0.5)


def test_a_seed_gives_the_same_requests_and_no_prompt_is_there_twice() -> None:
    found = arrivals(SHIFT, 100)

    assert found == arrivals(SHIFT, 100)
    assert found == sorted(found, key=lambda each: (each.phase, each.at_s))
    long = [each.token_ids for each in found if each.answer_tokens == 4]
    assert len({prompt[:16] for prompt in long}) == len(long)
    assert {len(prompt) for prompt in long} == {200}


def test_the_report_counts_workers_that_were_started_again_and_says_since_when_roles_stay() -> None:
    tallies = [
        PhaseTally(requests=3, ttft_s=[0.2, 0.1, 0.3], heavy=[(0.0, 0), (2.0, 1), (4.0, 2)]),
        PhaseTally(requests=2, wrong=1, failed=Counter({"UNAVAILABLE": 1}), ttft_s=[0.5], heavy=[(0.0, 2)]),
        PhaseTally(requests=0, heavy=[(0.0, 2), (9.0, 1)]),
    ]

    found = report(tallies, {"shared-0": 1, "shared-1": 1, "shared-2": 1}, {"shared-0": 1, "shared-1": 2})

    assert found["restarts"] == 2
    assert (found["requests"], found["failed"], found["wrong"]) == (5, 1, 1)
    assert [(phase["heavy_at_end"], phase["settled_s"]) for phase in found["phases"]] == [(2, 4.0), (2, 0.0), (1, 9.0)]
    assert [phase["ttft_p50_s"] for phase in found["phases"]] == [0.2, 0.5, None]
