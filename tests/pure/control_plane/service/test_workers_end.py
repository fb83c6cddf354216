"""Which workers stay when their `rachis serve` ends."""

from typing import cast

import pytest

from cluster_configs.schema import RachisConfig
from control_plane.pools.life import Pools
from control_plane.service.lease import ServiceLease
from control_plane.service.workers_end import WorkersEnd


class Asked:
    """In place of the pools and of the lease."""

    def __init__(self, *, has_name: bool) -> None:
        self.has_name = has_name
        self.questions = 0
        self.stay: bool | None = None

    async def is_ours(self) -> bool:
        self.questions += 1
        return self.has_name

    async def stop(self, *, leave_workers: bool) -> None:
        self.stay = leave_workers


async def ended(
    *, has_name: bool, taken_over: bool = False, is_up: bool = True, outlive: bool = True, leave: bool = False
) -> Asked:
    service = {"name": "chat", "leave_workers": leave}
    config = RachisConfig.model_validate({"service": service, "ray": {"address": "auto"} if outlive else {}})
    asked = Asked(has_name=has_name)
    end = WorkersEnd(config, cast(Pools, asked), cast(ServiceLease, asked), taken_over=taken_over)
    end.is_up = is_up
    await end.run()
    return asked


@pytest.mark.parametrize("taken_over", [False, True])
async def test_one_that_has_its_name_ends_its_workers_and_one_that_has_lost_it_leaves_them(taken_over: bool) -> None:
    """It asks: it may have been held up since its last renewal, and they may serve another one."""
    for has_name in (True, False):
        asked = await ended(has_name=has_name, taken_over=taken_over)
        assert (asked.stay, asked.questions) == (not has_name, 1)


async def test_a_start_that_fails_leaves_what_it_took_over_and_ends_what_it_started() -> None:
    for taken_over in (True, False):
        assert (await ended(has_name=True, taken_over=taken_over, is_up=False)).stay is taken_over


async def test_one_that_is_told_to_leaves_them() -> None:
    assert (await ended(has_name=True, leave=True)).stay


async def test_what_does_not_outlive_it_ends_and_nobody_is_asked() -> None:
    asked = await ended(has_name=False, outlive=False)
    assert (asked.stay, asked.questions) == (False, 0)
