"""The systemd unit gives a service the time to stop that it takes."""

import re

import pytest

from cluster_configs.loading import load
from tests import ROOT

FOLDER = ROOT / "cluster_configs/service"
# Gateways stop before requests do, Redis after the workers.
BESIDE_S = 30.0


def stops_within_s(unit: str) -> float:
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    return float(seconds)


@pytest.mark.parametrize(("file", "profile"), [("gpu.yaml", "gpu-pools"), ("cpu.yaml", "cpu-pools")])
def test_a_service_that_stops_is_not_ended_before_it_has_kept_its_own_limits(file: str, profile: str) -> None:
    config = load(profile=profile, file=FOLDER / file).config
    own_s = config.router.drain_timeout_s + config.limits.stop_timeout_s + BESIDE_S
    assert own_s <= stops_within_s((FOLDER / "rachis.service").read_text())


def test_the_unit_says_what_its_time_is_made_of() -> None:
    lines = (FOLDER / "rachis.service").read_text().splitlines()
    place = next(index for index, line in enumerate(lines) if line.startswith("TimeoutStopSec="))
    said, config = " ".join(lines[place - 2 : place]), load().config
    assert "router.drain_timeout_s" in said and "limits.stop_timeout_s" in said
    named = (config.router.drain_timeout_s, config.limits.stop_timeout_s, BESIDE_S)
    assert " + ".join(f"{seconds:g}" for seconds in named) in said
