"""Grammars that take longer than they may, or wait longer."""

import asyncio

import pytest

from cluster_core.errors import InvalidInputError, OverloadedError
from tests.fakes.grammar_compiler import MODEL, Compilers, checking, regex, something_given


@pytest.fixture
def compilers() -> Compilers:
    return Compilers()


async def test_one_that_takes_too_long_ends_its_process_and_nothing_else(compilers: Compilers) -> None:
    checks = checking(compilers, timeout_s=0.01)
    with pytest.raises(InvalidInputError, match=r"longer than 0\.01 s"):
        await checks.check(regex("slow"), MODEL)
    await checks.check(regex("a+"), MODEL)
    assert [each.killed for each in compilers.made] == [True, False]
    with pytest.raises(InvalidInputError, match="longer"):
        await checks.check(regex("slow"), MODEL)
    assert compilers.given == ["slow", "a+"], "it is known, and not tried again"


async def test_who_waits_too_long_for_the_turn_may_come_again(compilers: Compilers) -> None:
    checks = checking(compilers, wait_s=0.01)
    holder = asyncio.create_task(checks.check(regex("held"), MODEL))
    await something_given(compilers)
    with pytest.raises(OverloadedError, match="one at a time") as refused:
        await checks.check(regex("a+"), MODEL)
    assert refused.value.retry_after_ms
    compilers.made[0].go_on.set()
    await asyncio.gather(holder, return_exceptions=True)
    await checks.close()
