"""What `structured_outputs` ask for, compiled once before any worker hears of it.

A grammar can be small and take for ever, or all memory: it is compiled in a process of its own
(`worker_runtime.grammar_compiler`), one at a time, within bounds. What was found is remembered, so that a grammar that
many requests bring is compiled once. The process is started by the first request that needs it.
"""

import asyncio
import base64
import json
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from typing import Protocol, Self

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import InvalidInputError, OverloadedError, UnavailableError
from control_plane.intake.validation import STRUCTURED_KINDS
from worker_runtime.preloaded_python import engine_python

_RETRY_AFTER_MS = 2000
# The process loads vLLM and a tokenizer: on a busy machine that takes a while.
_START_TIMEOUT_S = 120.0
# A process that ends under a grammar is no proof against the grammar; two are.
_TRIES = 2


class GrammarCompiler(Protocol):
    """A process that compiles grammars, for one model."""

    async def compile(self, wanted: generation.StructuredOutputs) -> str:
        """What is wrong with it, or an empty text. Raises EOFError where the process has ended over it."""

    async def kill(self) -> None:
        """Also one that is gone."""


# By the model's tokenizer and the size of its vocabulary. Raises OSError.
StartCompiler = Callable[[wire.ModelInfo], Awaitable[GrammarCompiler]]


class Grammars:
    """timeout_s: for one grammar. wait_s: how long a request waits for its grammar's turn, and for the process.

    most_known: grammars that are remembered. most_waiting: grammars that are compiled, or wait for that.
    """

    def __init__(
        self,
        start: StartCompiler,
        *,
        timeout_s: float,
        wait_s: float,
        most_known: int = 4096,
        most_waiting: int = 64,
    ) -> None:
        self._start = start
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._most_known = most_known
        self._most_waiting = most_waiting
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[str]] = {}
        self._turn = asyncio.Lock()
        self._compiler: GrammarCompiler | None = None

    async def check(self, sampling: generation.SamplingParams, model: wire.ModelInfo, within: str = "") -> None:
        """Raises InvalidInputError with the compiler's sentence, OverloadedError, UnavailableError. within: before the
        name of the field in the first."""
        if not sampling.HasField("structured_outputs"):
            return
        wanted = sampling.structured_outputs
        key = wanted.SerializeToString(deterministic=True)
        problem = self._known.get(key)
        if problem is None:
            # Another one's may have pushed it out again before this one wakes.
            problem = await self._found(key, wanted, model)
        else:
            self._known.move_to_end(key)
        if problem:
            (kind,) = [kind for kind in STRUCTURED_KINDS if kind in {field.name for field, _ in wanted.ListFields()}]
            raise InvalidInputError(problem, field=f"{within}sampling.structured_outputs.{kind}")

    async def close(self) -> None:
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._end_compiler()

    async def _found(self, key: bytes, wanted: generation.StructuredOutputs, model: wire.ModelInfo) -> str:
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= self._most_waiting:
                raise OverloadedError(
                    f"{len(self._running)} grammars are compiled or wait for it, more are not taken",
                    retry_after_ms=_RETRY_AFTER_MS,
                )
            # Whatever is logged there is about no request: the grammar, and the process, are for all that come.
            compiling = self._compile(key, wanted, model)
            task = self._running[key] = asyncio.create_task(compiling, context=Context())
            task.add_done_callback(lambda done: self._ended(key, done))
        try:
            # Who leaves does not take it from others that wait for the same.
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise OverloadedError(
                f"grammars are compiled one at a time, and this one's turn did not come within {self._wait_s:g} s",
                retry_after_ms=_RETRY_AFTER_MS,
            ) from None

    async def _compile(self, key: bytes, wanted: generation.StructuredOutputs, model: wire.ModelInfo) -> str:
        async with self._turn:
            for _ in range(_TRIES):
                try:
                    compiler = await self._started(model)
                    async with asyncio.timeout(self._timeout_s):
                        problem = await compiler.compile(wanted)
                        break
                except TimeoutError:
                    problem = f"takes longer than {self._timeout_s:g} s to compile (router.grammar_timeout_s)"
                    await self._end_compiler()
                    break
                except EOFError:
                    problem = "takes more memory to compile than router.grammar_memory_mib"
                    await self._end_compiler()
            self._known[key] = problem
            if len(self._known) > self._most_known:
                self._known.popitem(last=False)
            return problem

    async def _started(self, model: wire.ModelInfo) -> GrammarCompiler:
        if self._compiler is None:
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    self._compiler = await self._start(model)
            except (OSError, EOFError, TimeoutError) as error:
                raise UnavailableError(
                    f"grammars cannot be compiled: {error or 'the process does not start'}",
                    retry_after_ms=_RETRY_AFTER_MS,
                ) from None
        return self._compiler

    async def _end_compiler(self) -> None:
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            await compiler.kill()

    def _ended(self, key: bytes, task: "asyncio.Task[str]") -> None:
        del self._running[key]
        if not task.cancelled():
            # Whoever has waited for it has it; nobody may have.
            task.exception()


class GrammarProcess:
    """`worker_runtime.grammar_compiler`, as a child; made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._requests, self._answers = process.stdin, process.stdout

    @classmethod
    async def start(cls, folder: str, vocabulary_size: int, memory_mib: int) -> Self:
        """Raises OSError, and EOFError where it ends at once."""
        process = await asyncio.create_subprocess_exec(
            *engine_python(),
            "-m",
            "worker_runtime.grammar_compiler",
            folder,
            str(vocabulary_size),
            str(memory_mib),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # A grammar is compiled on a processor: GPUs are the workers'.
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        made = cls(process)
        try:
            await made._answer()
        except BaseException:
            await made.kill()
            raise
        return made

    async def compile(self, wanted: generation.StructuredOutputs) -> str:
        with suppress(ConnectionError):
            self._requests.write(base64.b64encode(wanted.SerializeToString()) + b"\n")
            await self._requests.drain()
        answer = await self._answer()
        return str(answer["problem"])

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _answer(self) -> dict[str, str]:
        line = await self._answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the process that compiles grammars has ended")
        found: dict[str, str] = json.loads(line)
        return found
