"""What is remembered of requests during which engines died."""

from typing import Any

import pytest
from rachis.v1 import worker_pb2 as wire

from control_plane.dispatch.poison import _MOST_REMEMBERED, REMEMBER_S, PoisonMemory
from control_plane.model.job import Job
from control_plane.model.prefix_scope import PrefixScope
from tests.pure.control_plane.dispatch.played_journey import D0, P0, P1, new_job, worker


@pytest.fixture
def memory() -> PoisonMemory:
    return PoisonMemory()


def job(**changes: Any) -> Job:
    made = new_job(max_tokens=changes.pop("max_tokens", 8))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_deaths_add_up_over_requests_that_ask_for_the_same(memory: PoisonMemory) -> None:
    memory.blame(job(), P0, 0.0)
    memory.blame(job(), P1, 1.0)
    assert memory.deaths(job(), 2.0) == 2


def test_one_death_counts_once_of_however_many_that_ask_for_the_same(memory: PoisonMemory) -> None:
    for _ in range(3):
        memory.blame(job(), D0, 0.0)
    assert (memory.deaths(job(), 0.0), memory.poisoned(0.0)) == (1, 0)
    memory.blame(job(), worker("decode-0", 2), 1.0)
    assert (memory.deaths(job(), 1.0), memory.poisoned(1.0)) == (2, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"token_ids": [9, 9]},
        {"scope": PrefixScope("another tenant")},
        {"scope": PrefixScope(adapter=wire.Adapter(digest="a"))},
        {"max_tokens": 9},
    ],
)
def test_another_prompt_tenant_or_sampling_is_another_request(memory: PoisonMemory, other: dict[str, Any]) -> None:
    memory.blame(job(), P0, 0.0)
    assert memory.deaths(job(**other), 0.0) == 0


def test_a_whole_answer_absolves(memory: PoisonMemory) -> None:
    memory.blame(job(), P0, 0.0)
    memory.absolve(job())
    assert memory.deaths(job(), 0.0) == 0
    assert len(memory) == 0


def test_it_is_forgotten_so_long_after_the_last_death(memory: PoisonMemory) -> None:
    memory.blame(job(), P0, 0.0)
    memory.blame(job(token_ids=[1]), P0, 10.0)
    memory.blame(job(), P1, 20.0)
    assert memory.deaths(job(), 20.0 + REMEMBER_S - 1) == 2
    assert memory.deaths(job(token_ids=[1]), 20.0 + REMEMBER_S - 1) == 0
    assert memory.deaths(job(), 20.0 + REMEMBER_S) == 0
    assert len(memory) == 0


def test_it_is_no_longer_told_of_then_though_nothing_else_is_asked_for(memory: PoisonMemory) -> None:
    for engine in (P0, P1):
        memory.blame(job(), engine, 0.0)
    assert memory.poisoned(REMEMBER_S - 1) == 1
    assert memory.poisoned(REMEMBER_S) == 0


def test_no_more_than_so_many_are_remembered(memory: PoisonMemory) -> None:
    for number in range(_MOST_REMEMBERED + 10):
        memory.blame(job(token_ids=[number]), P0, 0.0)
    assert len(memory) == _MOST_REMEMBERED
    assert memory.deaths(job(token_ids=[0]), 0.0) == 0
    assert memory.deaths(job(token_ids=[_MOST_REMEMBERED]), 0.0) == 1
