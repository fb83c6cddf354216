"""How many of its requests a client repeats."""

from rachis.retries import RetryBudget


def repeated(budget: RetryBudget, requests: int) -> int:
    """Of so many requests that are refused for ever, each of which would be repeated twice."""
    return sum(budget.take() for _ in range(requests) for _ in range(budget.of_request(2)))


def test_a_bad_moment_is_repeated_in_full() -> None:
    assert repeated(RetryBudget(), 5) == 10


def test_an_overload_is_repeated_as_a_share_of_all_requests() -> None:
    assert 200 <= repeated(RetryBudget(), 1000) <= 210


def test_what_is_saved_up_has_a_limit() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.of_request(0)
    assert repeated(budget, 100) <= 10 + 20
