"""What a router may expect of the process that compiles grammars; the fake of the unit tests keeps to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rachis.v1 import generation_pb2 as generation

from cluster_configs.schema import ModelSection
from control_plane.intake.grammars import GrammarCompiler, GrammarProcess
from tests.fakes.grammar_compiler import FakeGrammarCompiler

VOCABULARY_SIZE = 320
MEMORY_MIB = 512
# Small texts that would take all memory, or longer than anybody waits.
EXPLODES: dict[str, Any] = {
    "regex": "(.{0,10000}){0,10000}",
    "json": '{"type": "array", "items": {"type": "integer"}, "minItems": 1000000, "maxItems": 2000000}',
}


@pytest.fixture(scope="module", params=["fake", pytest.param("vllm", marks=pytest.mark.integration)])
async def compiler(request: pytest.FixtureRequest) -> AsyncIterator[GrammarCompiler]:
    made: GrammarCompiler = FakeGrammarCompiler()
    if request.param == "vllm":
        made = await process()
    yield made
    await made.kill()
    await made.kill()


async def process() -> GrammarProcess:
    return await GrammarProcess.start(ModelSection().resolved_path, VOCABULARY_SIZE, MEMORY_MIB)


async def test_what_compiles_has_no_problem_and_what_does_not_has_a_sentence(compiler: GrammarCompiler) -> None:
    assert await compiler.compile(generation.StructuredOutputs(regex="[a-f]{3}")) == ""
    assert "parenthesis" in await compiler.compile(generation.StructuredOutputs(regex="bad ("))
    assert await compiler.compile(generation.StructuredOutputs(regex="")) == ""


@pytest.mark.integration
async def test_one_that_has_ended_says_so() -> None:
    made: GrammarCompiler
    for made in (FakeGrammarCompiler(), await process()):
        await made.kill()
        with pytest.raises(EOFError):
            await made.compile(generation.StructuredOutputs(regex="a"))
        await made.kill()


# What the problem says; None: whatever it is.
KINDS: list[tuple[dict[str, Any], str | None]] = [
    ({"json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}, ""),
    ({"json": "{no json"}, "JSON"),
    ({"json": '{"type": "integer", "multipleOf": 3}'}, "not supported"),
    ({"json": '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'}, None),
    ({"json": '{"a":' * 300 + "1" + "}" * 300}, "nested"),
    ({"json": ""}, None),
    ({"json_object": True}, ""),
    ({"choice": ["red", "blue", 'a "quoted" one', "\n", "é"]}, ""),
    ({"grammar": 'root ::= "a" root | "b"'}, ""),
    ({"grammar": 'root ::= root "a" | "b"'}, None),
    ({"grammar": "root ::= nowhere"}, "grammar"),
    ({"grammar": " "}, None),
    ({"regex": "a\x00b"}, "NUL"),
    ({"structural_tag": '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}}}'}, ""),
    ({"structural_tag": "{}"}, None),
]


@pytest.mark.integration
async def test_every_kind_is_compiled_or_refused_and_the_process_goes_on() -> None:
    made = await process()
    try:
        for wanted, said in KINDS:
            problem = await made.compile(generation.StructuredOutputs(**wanted))
            if said is not None:
                assert (said in problem) if said else not problem, (wanted, problem)
            assert len(problem) <= 500
            assert await made.compile(generation.StructuredOutputs(regex="a")) == ""
    finally:
        await made.kill()


@pytest.mark.integration
@pytest.mark.parametrize("kind", sorted(EXPLODES))
async def test_one_that_explodes_takes_no_more_than_it_may(kind: str) -> None:
    """It is refused, or ends the process, or is ended with it: what it takes until then is bounded by the kernel."""
    made = await process()
    # The kernel tells the memory of a process by its id, which is nobody else's business.
    pid = made._process.pid
    try:
        async with asyncio.timeout(20):
            await made.compile(generation.StructuredOutputs(**{kind: EXPLODES[kind]}))
    except (TimeoutError, EOFError):
        pass
    finally:
        assert _peak_mib(pid) < 3 * MEMORY_MIB
        await made.kill()


def _peak_mib(pid: int) -> float:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)
    return 0.0
