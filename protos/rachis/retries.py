"""How often a client repeats what was refused: a share of its requests, so that an overload is not made worse."""

from rachis.errors import OverloadedError, RachisError, UnavailableError

# Retries for each request, and how many may be saved up for a bad moment.
_SHARE = 0.2
_MOST = 10.0


class RetryBudget:
    """Of one client, over all its requests and routers (as Finagle's retry budget, and gRPC's retry throttling)."""

    def __init__(self) -> None:
        self._left = _MOST

    def of_request(self, most: int) -> "Retries":
        """One more request begins, and may be repeated so often at most."""
        self._left = min(_MOST, self._left + _SHARE)
        return Retries(self, most)

    def take(self) -> bool:
        """Whether one more retry is left; it is gone then."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Retries:
    """Of one request or session, of which nothing has come since it was asked for last."""

    def __init__(self, budget: RetryBudget, most: int) -> None:
        self._budget = budget
        self._left = most

    def wait_s(self, refused: RachisError, left_s: float, *, has_begun: bool) -> float | None:
        """How long the service wants it to wait until it is asked for again; None where it is not, or not in the time
        that is left. has_begun: of its answer, which is no more load than there was, and lost otherwise: the budget is
        for others."""
        wait_ms = refused.retry_after_ms
        if not self._left or wait_ms is None or not isinstance(refused, OverloadedError | UnavailableError):
            return None
        if wait_ms / 1000 >= left_s or not (has_begun or self._budget.take()):
            return None
        self._left -= 1
        return wait_ms / 1000
