"""Back ends of vLLM's own benchmark: this service over gRPC, and prompts that come in pieces, for all of them.

A prompt in pieces is what a retriever or a user brings over a while. A session computes what has come; whoever cannot
do that is asked once the last piece is there. Times count from then for both.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

from rachis import AsyncClient, InvalidInputError, RachisError
from rachis.v1 import generation_pb2 as generation

PLAIN, SESSION = "rachis", "rachis-session"
_SAMPLING = frozenset(generation.SamplingParams.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True, slots=True)
class Pieces:
    """count: of one prompt. interval_s: from one to the next."""

    count: int = 1
    interval_s: float = 0.0

    def of(self, prompt: Any) -> list[Any]:
        """A text, cut where words begin, or token ids; all of it in as many pieces, of which some may be empty."""
        if not isinstance(prompt, str):
            return [list(part) for part in _cut(prompt, self.count)]
        words = prompt.split(" ")
        spaced = [*(f"{word} " for word in words[:-1]), words[-1]]
        return ["".join(part) for part in _cut(spaced, self.count)]

    async def wait_for_all(self) -> None:
        await asyncio.sleep((self.count - 1) * self.interval_s)


def _cut(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    edges = [len(items) * number // count for number in range(count + 1)]
    return [items[begin:end] for begin, end in pairwise(edges)]


def request_functions(client: AsyncClient | None, pieces: Pieces) -> dict[str, Callable[..., Awaitable[Any]]]:
    """All that vLLM has, and ours, by the names of their back ends. client: None where only others are asked."""
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS

    found = {name: _after_all(function, pieces) for name, function in ASYNC_REQUEST_FUNCS.items()}
    if client is not None:
        found[PLAIN] = _asks(lambda request: _whole(client, request, pieces))
        found[SESSION] = _asks(lambda request: _in_pieces(client, request, pieces))
    return found


def _after_all(function: Any, pieces: Pieces) -> Callable[..., Awaitable[Any]]:
    async def ask(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        await pieces.wait_for_all()
        return await function(request_func_input, session, pbar)

    return ask


# When the last piece was there, then each piece of the answer.
_Answer = AsyncIterator[float | generation.CompletionDelta | generation.Completion]


def _asks(answers: Callable[[Any], _Answer]) -> Callable[..., Awaitable[Any]]:
    async def ask(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

        output = RequestFuncOutput(prompt_len=request_func_input.prompt_len)
        try:
            await measure(output, answers(request_func_input))
        except RachisError as error:
            output.error = f"{error.status}: {error}"
        if pbar is not None:
            pbar.update(1)
        return output

    return ask


async def measure(output: Any, answer: Any, now_s: Callable[[], float] = perf_counter) -> None:
    """Fills in vLLM's `RequestFuncOutput`."""
    last_s = 0.0
    async with aclosing(answer) as items:
        async for item in items:
            came_s = now_s()
            if isinstance(item, float):
                output.start_time = last_s = item
            elif isinstance(item, generation.Completion):
                output.output_tokens = item.usage.completion_tokens
                output.success = True
            elif item.token_ids:
                if not output.ttft:
                    output.ttft = came_s - output.start_time
                else:
                    output.itl.append(came_s - last_s)
                last_s = came_s
                output.generated_text += item.text
    output.latency = last_s - output.start_time


async def _whole(client: AsyncClient, request: Any, pieces: Pieces) -> _Answer:
    await pieces.wait_for_all()
    yield perf_counter()
    async with aclosing(client.stream(request.prompt, **_wishes(request))) as answer:
        async for item in answer:
            yield item


async def _in_pieces(client: AsyncClient, request: Any, pieces: Pieces) -> _Answer:
    *early, last = pieces.of(request.prompt)
    if not early:
        yield perf_counter()
    async with client.session(early[0] or None if early else None, mode="append", **_wishes(request)) as session:
        for piece in early[1:]:
            await asyncio.sleep(pieces.interval_s)
            if piece:
                await session.append(piece)
        if early:
            await asyncio.sleep(pieces.interval_s)
            yield perf_counter()
        async with aclosing(session.finish(last or None)) as deltas:
            async for delta in deltas:
                yield delta
        yield session.completion


def _wishes(request: Any) -> dict[str, Any]:
    """Raises InvalidInputError for what the benchmark's `--extra-body` has and the service does not."""
    given = dict(request.extra_body or {})
    unknown = given.keys() - _SAMPLING
    if unknown:
        raise InvalidInputError.local("is no sampling parameter over gRPC", field=f"--extra-body {min(unknown)}")
    return given | {
        "max_tokens": request.output_len,
        "ignore_eos": request.ignore_eos,
        **({"logprobs": request.logprobs} if request.logprobs is not None else {}),
    }
