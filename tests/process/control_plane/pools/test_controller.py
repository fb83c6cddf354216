"""How Ray is started or joined, with a Ray that does not come up."""

from typing import Any

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
