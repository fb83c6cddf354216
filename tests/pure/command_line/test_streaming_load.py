"""Which loads `rachis bench streaming` runs at."""

import pytest

from cluster_core.errors import ConfigError
from command_line.bench.streaming_run import load_shares


def test_loads_are_those_that_are_given() -> None:
    assert load_shares(None) == []
    assert load_shares("0.25, 1.5") == [0.25, 1.5]


@pytest.mark.parametrize("given", ["", "half", "0.5,", "0", "-1", "10.5", "nan", "inf"])
def test_a_load_that_is_no_share_of_saturation_is_refused_by_its_option(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--load: .*numbers above 0 and at most 10"):
        load_shares(given)
