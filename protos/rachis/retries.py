"""How often a client repeats what was refused: a share of its requests, so that an overload is not made worse."""

# Retries for each request, and how many may be saved up for a bad moment.
_SHARE = 0.2
_MOST = 10.0


class RetryBudget:
    """Of one client, over all its requests and routers (as Finagle's retry budget, and gRPC's retry throttling)."""

    def __init__(self) -> None:
        self._left = _MOST

    def of_request(self, most: int) -> int:
        """One more request begins, and may be repeated so often at most: returns that."""
        self._left = min(_MOST, self._left + _SHARE)
        return most

    def take(self) -> bool:
        """Whether one more retry is left; it is gone then."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
