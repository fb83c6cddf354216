"""Which loads `rachis bench streaming --load` runs at."""

import pytest

from cluster_core.errors import ConfigError
from command_line.bench.streaming_load_run import load_shares


def test_loads_go_from_half_to_beyond_saturation_unless_they_are_given() -> None:
    assert load_shares(None) == [0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2]
    assert load_shares("0.25, 1.5") == [0.25, 1.5]


@pytest.mark.parametrize("given", ["", "half", "0.5,", "0", "-1", "10.5", "nan", "inf"])
def test_a_load_that_is_no_share_of_saturation_is_refused_by_its_option(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--loads: .*numbers above 0 and at most 10"):
        load_shares(given)
