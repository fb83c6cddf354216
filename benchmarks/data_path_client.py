"""Many streams of long answers at once, in a process of its own: `python -m benchmarks.data_path_client FILE.json`.

Says a line once all have begun, and one at the end of the time: tokens and messages that came between the two. Messages
are read as gRPC has them, by no client of ours: what is measured is the other end.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rachis import conventions
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc, worker_pb2_grpc
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import cpu_s, monotonic_s

_ENDLESS = 1_000_000
_PROMPT = (10, 11, 12, 13)


@dataclass(frozen=True, slots=True)
class Load:
    """generation: of the worker at `address`, which is called itself and answers on the calls; 0: it is a router."""

    address: str
    generation: int
    streams: int
    seconds: float


class Counts:
    def __init__(self) -> None:
        self.tokens = 0
        self.messages = 0
        self.begun: set[int] = set()


async def run(load: Load) -> None:
    counts = Counts()
    async with grpc.aio.insecure_channel(load.address, options=conventions.channel_options(64 << 20)) as channel:
        reading = [
            asyncio.create_task(_read(_deltas(channel, load, each), each, counts)) for each in range(load.streams)
        ]
        while len(counts.begun) < load.streams:
            ended = [each for each in reading if each.done()]
            if ended:
                ended[0].result()
            await asyncio.sleep(0.05)
        began_s, before, cpu_before_s = monotonic_s(), (counts.tokens, counts.messages), cpu_s()
        print(json.dumps({"begun": load.streams}), flush=True)
        await asyncio.sleep(load.seconds)
        said = {
            "tokens": counts.tokens - before[0],
            "messages": counts.messages - before[1],
            "seconds": monotonic_s() - began_s,
            "cpu_s": cpu_s() - cpu_before_s,
        }
        print(json.dumps(said), flush=True)
        for each in reading:
            each.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _read(deltas: AsyncIterator[generation.CompletionDelta], number: int, counts: Counts) -> None:
    async for delta in deltas:
        counts.begun.add(number)
        counts.tokens += len(delta.token_ids)
        counts.messages += 1


def _deltas(channel: grpc.aio.Channel, load: Load, number: int) -> AsyncIterator[generation.CompletionDelta]:
    sampling = generation.SamplingParams(max_tokens=_ENDLESS)
    if not load.generation:
        prompt = generation.PromptInput(token_ids=generation.TokenIds(ids=_PROMPT))
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        return _of(stub.Generate(api.GenerateRequest(prompt=prompt, sampling=sampling)))
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    request = wire.DecodeRequest(
        request_id=f"r{number}", generation=load.generation, token_ids=_PROMPT, sampling=sampling
    )
    return _of(stub.Decode(request))


async def _of(call: Any) -> AsyncIterator[generation.CompletionDelta]:
    async for message in call:
        if message.HasField("delta"):
            yield message.delta


if __name__ == "__main__":
    asyncio.run(run(Load(**json.loads(Path(sys.argv[1]).read_text()))))
