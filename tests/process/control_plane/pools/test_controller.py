"""How Ray is started or joined, with a Ray that does not come up."""

import subprocess
from typing import Any

import psutil
import pytest
import ray

from cluster_configs.schema import RachisConfig
from cluster_core.errors import StartError
from control_plane.pools.controller import Controller
from control_plane.pools.ray_start import STARTS

# Ray raises a bare one.
LATE = Exception("The current node timed out during startup.")


@pytest.mark.parametrize("error", [LATE, ConnectionError("gone")])
def test_a_ray_that_does_not_start_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def init(**_settings: Any) -> None:
        raise error

    # Ray is global: there is no port to hand another one in by.
    monkeypatch.setattr(ray, "init", init)

    with pytest.raises(StartError, match=f"Ray did not start: {error}") as caught:
        Controller(RachisConfig(), "svc", "mark").connect()

    assert caught.value.field == "ray.address"


def test_an_own_ray_that_a_busy_machine_has_kept_from_starting_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def init(**settings: Any) -> None:
        tries.append(settings)
        if len(tries) < STARTS:
            raise LATE

    # Ray is global: there is no port to hand another one in by.
    monkeypatch.setattr(ray, "init", init)

    Controller(RachisConfig(), "svc", "mark").connect()

    assert len(tries) == STARTS
    assert tries[0] == tries[-1]


def test_of_a_ray_that_was_late_nothing_runs_on_and_what_ran_before_does(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rays: list[subprocess.Popen[bytes]] = []

    def init(**_settings: Any) -> None:
        assert not any(psutil.pid_exists(process.pid) for process in of_rays)
        of_rays.append(subprocess.Popen(["sleep", "600"]))
        if len(of_rays) < STARTS:
            raise LATE

    # As above.
    monkeypatch.setattr(ray, "init", init)
    before = subprocess.Popen(["sleep", "600"])
    try:
        Controller(RachisConfig(), "svc", "mark").connect()

        assert [psutil.pid_exists(process.pid) for process in (*of_rays, before)] == [False, False, True, True]
    finally:
        for process in (*of_rays, before):
            process.kill()
            process.wait()


@pytest.mark.parametrize(("address", "error"), [(None, ConnectionError("gone")), ("127.0.0.1:1", LATE)])
def test_another_error_and_that_of_a_ray_that_runs_elsewhere_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str | None, error: Exception
) -> None:
    tries = []

    def init(**settings: Any) -> None:
        tries.append(settings)
        raise error

    # As above.
    monkeypatch.setattr(ray, "init", init)

    with pytest.raises(StartError, match=str(error)):
        Controller(RachisConfig.model_validate({"ray": {"address": address}}), "svc", "mark").connect()
    assert len(tries) == 1
