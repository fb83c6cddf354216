"""How Ray is started or joined, with a Ray that does not come up."""

from typing import Any

import pytest
import ray

from cluster_configs.schema import RachisConfig
from cluster_core.errors import StartError
from control_plane.pools.controller import Controller


@pytest.mark.parametrize("error", [Exception("The current node timed out during startup."), ConnectionError("gone")])
def test_a_ray_that_does_not_start_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def init(**_settings: Any) -> None:
        raise error

    # Ray is global: there is no port to hand another one in by.
    monkeypatch.setattr(ray, "init", init)

    with pytest.raises(StartError, match=f"Ray did not start: {error}") as caught:
        Controller(RachisConfig(), "svc", "mark").connect()

    assert caught.value.field == "ray.address"
