"""A client that does its worst, in a process of its own: `python -m benchmarks.hostile_client ADDRESS SECONDS`.

Each kind of input is one that once stalled the router's loop, took its slots or grew its memory.
"""

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable

import grpc
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc

from cluster_core.clock import monotonic_s

_OPTIONS = [("grpc.max_send_message_length", -1)]
_NARROW = [*_OPTIONS, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]
_TIMEOUT_S = 5.0
# At a time, of each kind.
_AT_ONCE = 2
# Of a message: a quarter of the default limit, and nearly all of it.
_SIZES_MIB = (3.9, 15.0)

Attack = Callable[[str], Awaitable[None]]


async def _generate(address: str, request: api.GenerateRequest, compression: grpc.Compression) -> None:
    async with grpc.aio.insecure_channel(address, options=_OPTIONS, compression=compression) as channel:
        async for _ in router_pb2_grpc.RouterServiceStub(channel).Generate(request, timeout=_TIMEOUT_S):
            pass


def _bytes() -> int:
    return int(random.choice(_SIZES_MIB) * (1 << 20))


async def compressed_tokens(address: str) -> None:
    """Millions of token ids in a few kilobytes."""
    prompt = generation.PromptInput(token_ids=generation.TokenIds(ids=[0] * _bytes()))
    await _generate(address, api.GenerateRequest(prompt=prompt), grpc.Compression.Gzip)


async def long_text(address: str) -> None:
    prompt = generation.PromptInput(text="hijk lmnop " * (_bytes() // 11))
    await _generate(address, api.GenerateRequest(prompt=prompt), grpc.Compression.Gzip)


async def many_messages(address: str) -> None:
    turns = [generation.ChatMessage(role="user", content="a")] * (_bytes() // 12)
    prompt = generation.PromptInput(chat=generation.ChatMessages(messages=turns))
    await _generate(address, api.GenerateRequest(prompt=prompt), grpc.Compression.Gzip)


async def most_messages(address: str) -> None:
    """As many as are taken."""
    turns = [generation.ChatMessage(role="user", content="a")] * 4096
    prompt = generation.PromptInput(chat=generation.ChatMessages(messages=turns))
    await _generate(address, api.GenerateRequest(prompt=prompt), grpc.Compression.NoCompression)


async def many_pieces(address: str) -> None:
    """Updates of many pieces, each just short enough to be looked at inline."""
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).StreamGenerate(timeout=_TIMEOUT_S)  # type: ignore[call-arg]
        opened = api.SessionOpen(mode=generation.SESSION_MODE_UPDATE, sampling=generation.SamplingParams(max_tokens=4))
        await call.write(api.StreamGenerateRequest(open=opened))
        text = ("abcdefg hijk lmnop " * 500)[:8000]
        for revision in range(1, 20):
            context = [api.SessionPiece(text=text)] * (_bytes() // (len(text) + 16))
            await call.write(api.StreamGenerateRequest(update=api.SessionUpdate(revision=revision, context=context)))
        call.cancel()


async def abandoned_sessions(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        calls = []
        for number in range(200):
            call = stub.StreamGenerate(timeout=_TIMEOUT_S)  # type: ignore[call-arg]
            if number % 2:
                opened = api.SessionOpen(mode=generation.SESSION_MODE_APPEND)
                await call.write(api.StreamGenerateRequest(open=opened))
            calls.append(call)
        await asyncio.sleep(1.0)


async def slow_readers(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=_NARROW) as channel:
        sampling = generation.SamplingParams(max_tokens=2000, logprobs=20, ignore_eos=True)
        request = api.GenerateRequest(prompt=generation.PromptInput(text="hello"), sampling=sampling)
        calls = [router_pb2_grpc.RouterServiceStub(channel).Generate(request, timeout=_TIMEOUT_S) for _ in range(4)]
        await asyncio.sleep(_TIMEOUT_S)
        for call in calls:
            call.cancel()


async def noise(address: str) -> None:
    """Bytes that are no message."""
    rng = random.Random()
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        method = channel.unary_stream("/rachis.v1.RouterService/Generate", bytes, bytes)
        for _ in range(50):
            call = method(rng.randbytes(rng.randrange(2000)), timeout=_TIMEOUT_S)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError:
                continue


ATTACKS: tuple[Attack, ...] = (
    compressed_tokens, long_text, many_messages, most_messages, many_pieces, abandoned_sessions, slow_readers, noise,
)  # fmt: skip


async def attack(address: str, seconds: float) -> None:
    end_s = monotonic_s() + seconds

    async def again_and_again(one: Attack) -> None:
        while monotonic_s() < end_s:
            try:
                await one(address)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                await asyncio.sleep(0.05)

    await asyncio.gather(*(again_and_again(one) for one in ATTACKS for _ in range(_AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(attack(sys.argv[1], float(sys.argv[2])))
