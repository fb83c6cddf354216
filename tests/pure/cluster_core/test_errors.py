"""One error out of those that a TaskGroup raises together."""

import asyncio

import pytest

from cluster_core.errors import DeadlineError, UnavailableError, Ungrouped


async def fail(error: Exception) -> None:
    raise error


async def run(*errors: Exception) -> None:
    with Ungrouped():
        async with asyncio.TaskGroup() as tasks:
            for error in errors:
                tasks.create_task(fail(error))


async def test_an_error_of_ours_comes_out_of_its_group_before_any_other() -> None:
    with pytest.raises(UnavailableError, match="ours"):
        await run(ZeroDivisionError(), UnavailableError("ours"))


async def test_groups_in_groups_are_opened() -> None:
    with pytest.raises(DeadlineError):
        await run(ExceptionGroup("", [ZeroDivisionError(), ExceptionGroup("", [DeadlineError("late")])]))


async def test_a_defect_alone_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        await run(ZeroDivisionError())


async def test_without_a_group_nothing_is_changed() -> None:
    with pytest.raises(KeyError), Ungrouped():
        raise KeyError
