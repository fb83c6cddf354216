"""What ends a call: its client, or its deadline."""

import pytest

from control_plane.intake.arrivals import expired

_CASES = [
    # given_s, remaining_s, expired
    (None, None, False),
    (60.0, 0.0, True),
    (60.0, 0.4, True),
    (60.0, 0.6, False),
    (1.0, 0.05, True),
    (1.0, 0.5, False),
    (0.0, 0.0, True),
]


@pytest.mark.parametrize(("given_s", "remaining_s", "is_expired"), _CASES)
def test_a_call_that_its_client_ends_in_the_last_part_of_its_time_has_expired(
    given_s: float | None, remaining_s: float | None, is_expired: bool
) -> None:
    assert expired(given_s, remaining_s) is is_expired
