"""What a batch may take, and what came of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """concurrency: requests at once. tries: of one that the service fails at. Seconds: of one try, and of the batch."""

    concurrency: int
    tries: int
    try_s: float
    window_s: float


@dataclass(slots=True)
class BatchFigures:
    answered: int = 0
    # With an answer that is an error.
    failed: int = 0
    # Of those, without any answer in the batch's time.
    expired: int = 0
    # Tries beyond the first.
    tried_again: int = 0
