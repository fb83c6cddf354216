"""Grammars are compiled one at a time and once each, within bounds; whoever explodes takes nobody along."""

import asyncio
import logging

import pytest
from rachis.v1 import generation_pb2 as generation

from cluster_core import event_log
from cluster_core.errors import InvalidInputError, OverloadedError, UnavailableError
from tests.fakes.grammar_compiler import MODEL, Compilers, FakeGrammarCompiler, checking, regex, something_given


@pytest.fixture
def compilers() -> Compilers:
    return Compilers()


async def test_what_asks_for_none_starts_nothing(compilers: Compilers) -> None:
    await checking(compilers).check(generation.SamplingParams(temperature=1), MODEL)
    assert compilers.made == []


async def test_a_grammar_is_compiled_once_however_many_bring_it(compilers: Compilers) -> None:
    checks = checking(compilers)
    await asyncio.gather(*(checks.check(regex("a+"), MODEL) for _ in range(20)))
    await checks.check(regex("a+"), MODEL)
    await checks.check(regex("b+"), MODEL)
    assert (compilers.given, len(compilers.made)) == (["a+", "b+"], 1)


async def test_what_does_not_compile_is_refused_by_its_field_each_time(compilers: Compilers) -> None:
    checks = checking(compilers)
    for _ in range(2):
        with pytest.raises(InvalidInputError, match="unbalanced") as refused:
            await checks.check(regex("bad ("), MODEL, "open.")
        assert refused.value.field == "open.sampling.structured_outputs.regex"
    assert compilers.given == ["bad ("]


async def test_one_under_which_two_processes_end_takes_too_much_memory(compilers: Compilers) -> None:
    checks = checking(compilers)
    with pytest.raises(InvalidInputError, match="grammar_memory_mib"):
        await checks.check(regex("huge"), MODEL)
    await checks.check(regex("a+"), MODEL)
    assert compilers.given == ["huge", "huge", "a+"]


async def test_a_process_that_somebody_ends_is_nobodys_fault(compilers: Compilers) -> None:
    checks = checking(compilers)
    await checks.check(regex("a+"), MODEL)
    await compilers.made[0].kill()
    await checks.check(regex("b+"), MODEL)
    assert compilers.given == ["a+", "b+"]
    assert len(compilers.made) == 2


async def test_who_leaves_does_not_take_it_from_others(compilers: Compilers) -> None:
    checks = checking(compilers)
    first, second = (asyncio.create_task(checks.check(regex("held"), MODEL)) for _ in range(2))
    await something_given(compilers)
    first.cancel()
    await asyncio.sleep(0)
    compilers.made[0].go_on.set()
    await second
    assert first.cancelled()
    assert compilers.given == ["held"]


async def test_more_than_so_many_do_not_wait(compilers: Compilers) -> None:
    checks = checking(compilers, most_waiting=2)
    waiting = [asyncio.create_task(checks.check(regex(f"held{number}"), MODEL)) for number in range(2)]
    await something_given(compilers)
    with pytest.raises(OverloadedError, match="2 grammars"):
        await checks.check(regex("a+"), MODEL)
    await checks.close()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended)


@pytest.mark.parametrize("error", [OSError("no memory"), EOFError("has ended")])
async def test_without_a_process_it_is_a_fault_of_the_service(error: Exception) -> None:
    compilers = Compilers(fails=error)
    checks = checking(compilers)
    with pytest.raises(UnavailableError, match=str(error)):
        await checks.check(regex("a+"), MODEL)
    compilers.fails = None
    await checks.check(regex("a+"), MODEL)


async def test_what_is_known_is_bounded(compilers: Compilers) -> None:
    checks = checking(compilers, most_known=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        await checks.check(regex(text), MODEL)
    assert compilers.given == ["a", "b", "c", "b"], "the one that nobody asked for longest is forgotten"


async def test_who_waits_for_one_that_is_pushed_out_at_once_still_hears(compilers: Compilers) -> None:
    checks = checking(compilers, most_known=1)
    texts = ("a", "b", "c", "bad (")
    found = await asyncio.gather(
        *(checks.check(regex(text), MODEL) for text in texts for _ in range(3)), return_exceptions=True
    )
    assert [type(each) for each in found] == [type(None)] * 9 + [InvalidInputError] * 3


async def test_closing_ends_the_process(compilers: Compilers) -> None:
    checks = checking(compilers)
    await checks.check(regex("a+"), MODEL)
    await checks.close()
    assert compilers.made[0].killed


async def test_what_the_compiler_logs_is_about_no_request(compilers: Compilers) -> None:
    event_log.about("the-first", "its-trace")
    about = []

    class Telling(FakeGrammarCompiler):
        async def compile(self, wanted: generation.StructuredOutputs) -> str:
            event = event_log.event_of(logging.makeLogRecord({"msg": "it compiles"}), "", "router")
            about.append((event.request_id, event.trace_id))
            return await super().compile(wanted)

    compilers.kind = Telling
    await checking(compilers).check(regex("a+"), MODEL)
    assert about == [("", "")]
