"""A compiler of grammars that knows a few regular expressions by heart; `test_grammar_contract.py` has the contract."""

import asyncio

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from control_plane.intake.grammars import Grammars

MODEL = wire.ModelInfo(name="fake", vocabulary_size=256)


class FakeGrammarCompiler:
    """`bad (` does not compile, `slow` never ends, `huge` ends the process; `held…` waits for `go_on`."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.killed = False
        self.go_on = asyncio.Event()

    async def compile(self, wanted: generation.StructuredOutputs) -> str:
        if self.killed:
            raise EOFError("the process that compiles grammars has ended")
        self.given.append(wanted.regex)
        if wanted.regex == "slow":
            await asyncio.Event().wait()
        if wanted.regex == "huge":
            self.killed = True
            raise EOFError("the process that compiles grammars has ended")
        if wanted.regex.startswith("held"):
            await self.go_on.wait()
        return "unbalanced parenthesis" if wanted.regex == "bad (" else ""

    async def kill(self) -> None:
        self.killed = True


class Compilers:
    """Those that were started; `known` is what all of them were given."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        self.made: list[FakeGrammarCompiler] = []
        self.fails = fails
        self.kind = FakeGrammarCompiler

    async def start(self, model: wire.ModelInfo) -> FakeGrammarCompiler:
        if self.fails is not None:
            raise self.fails
        assert model is MODEL
        self.made.append(self.kind())
        return self.made[-1]

    @property
    def given(self) -> list[str]:
        return [each for compiler in self.made for each in compiler.given]


def checking(compilers: Compilers, *, timeout_s: float = 60.0, wait_s: float = 60.0, **limits: int) -> Grammars:
    return Grammars(compilers.start, timeout_s=timeout_s, wait_s=wait_s, **limits)


def regex(text: str) -> generation.SamplingParams:
    return generation.SamplingParams(structured_outputs=generation.StructuredOutputs(regex=text))


async def something_given(compilers: Compilers) -> None:
    while not compilers.given:  # noqa: ASYNC110 - compilers are made and given to by turns
        await asyncio.sleep(0)
