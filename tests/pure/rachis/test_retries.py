"""How many of its requests a client repeats."""

import grpc
import pytest
from rachis.conventions import RETRY_AFTER
from rachis.errors import DeadlineError, OverloadedError, RachisError, UnavailableError
from rachis.retries import Retries, RetryBudget

FULL = OverloadedError(
    grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata((RETRY_AFTER, "500")), "full", None
)


def waits(retries: Retries, refused: RachisError = FULL, left_s: float = 60.0, *, has_begun: bool = False) -> bool:
    return retries.wait_s(refused, left_s, has_begun=has_begun) is not None


def repeated(budget: RetryBudget, requests: int, *, has_begun: bool = False) -> int:
    """Of so many requests that are refused for ever, each of which would be repeated twice."""
    asked = (budget.of_request(2) for _ in range(requests))
    return sum(waits(each, has_begun=has_begun) for each in asked for _ in range(3))


def test_a_bad_moment_is_repeated_in_full() -> None:
    assert repeated(RetryBudget(), 5) == 10


def test_an_overload_is_repeated_as_a_share_of_all_requests() -> None:
    assert 200 <= repeated(RetryBudget(), 1000) <= 210


def test_what_is_saved_up_has_a_limit() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.of_request(0)
    assert repeated(budget, 100) <= 10 + 20


def test_what_has_begun_takes_nothing_from_what_others_have() -> None:
    budget = RetryBudget()
    assert repeated(budget, 100, has_begun=True) == 200
    assert repeated(budget, 5) == 10


def test_a_request_waits_as_long_as_the_service_says_where_it_has_the_time() -> None:
    retries = RetryBudget().of_request(2)
    assert retries.wait_s(FULL, 0.5, has_begun=False) is None
    assert retries.wait_s(FULL, 0.6, has_begun=False) == 0.5


@pytest.mark.parametrize("refused", [UnavailableError.local("no hint"), DeadlineError.local("too late")])
def test_what_does_not_say_when_to_come_back_is_not_repeated(refused: RachisError) -> None:
    assert not waits(RetryBudget().of_request(2), refused)
