"""The baseline of every comparison: one plain vLLM engine, without connector or hand-off, in a process of its own.

It speaks WorkerService like a decode worker, so that both sides are measured through the same call.
`python -m benchmarks.plain_engine CONFIG.json` serves until its standard input closes.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from rachis import conventions
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_configs.schema import RachisConfig
from cluster_core.bound_child import bind_to_parent
from cluster_core.errors import StartError
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment
from worker_runtime.preloaded_python import engine_python
from worker_runtime.wire_conversion import to_wire

GENERATION = 0
_MAX_MESSAGE_BYTES = 256 << 20


@asynccontextmanager
async def plain_engine(config: RachisConfig) -> AsyncIterator[tuple[str, wire.ModelInfo]]:
    """(address, model) of a plain engine with the configuration's model and engine sections; ended after the block.

    A step takes a whole prompt of any length, and one that has no room beside others waits for the next: on a CPU vLLM
    does not survive a prompt with a seed that is prefilled in chunks.
    """
    engine = config.engine
    whole = {
        "max_batched_tokens": max(engine.max_batched_tokens, engine.max_model_len),
        "vllm": (*engine.vllm, "enable_chunked_prefill=false"),
    }
    config = config.model_copy(update={"engine": engine.model_copy(update=whole)})
    with tempfile.TemporaryDirectory(prefix="rachis-plain-") as folder:
        file = Path(folder) / "config.json"
        file.write_text(config.model_dump_json())
        with (Path(folder) / "log").open("w+b") as log:
            process = await asyncio.create_subprocess_exec(
                *engine_python(), "-m", "benchmarks.plain_engine", str(file),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, preexec_fn=bind_to_parent,
            )  # fmt: skip
            assert process.stdout is not None
            try:
                try:
                    async with asyncio.timeout(config.limits.start_timeout_s):
                        address, model = await _announced(process.stdout)
                except (TimeoutError, ValueError):
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines()
                    raise StartError(f"the plain engine did not start: {lines[-1] if lines else 'no word'}") from None
                yield address, model
            finally:
                await end(process, config.limits.stop_timeout_s)


async def _announced(output: asyncio.StreamReader) -> tuple[str, wire.ModelInfo]:
    """The line `ready ADDRESS HEX`; ValueError when the output ends without it."""
    async for line in output:
        if line.startswith(b"ready "):
            _, address, model = line.decode().split()
            return address, wire.ModelInfo.FromString(bytes.fromhex(model))
    raise ValueError("ended early")


async def end(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    """A child that serves until its standard input closes; killed where it goes on."""
    assert process.stdin is not None
    # `communicate` leaves it open where nothing is to be written.
    process.stdin.close()
    try:
        async with asyncio.timeout(timeout_s):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _serve(config: RachisConfig) -> None:
    settings = EngineSettings(config.model, config.engine, config.handoff, EngineRole.ALONE, lora=config.lora)
    os.environ.update(engine_environment(settings))
    # Imported here because they read the environment.
    from decode_worker.service import DecodeService
    from worker_runtime.vllm_engine import VllmEngine

    engine = VllmEngine(settings)
    info = await engine.start(lambda phase: None, _die)
    server = grpc.aio.server(options=conventions.channel_options(_MAX_MESSAGE_BYTES))
    record = wire.WorkerRegistration(worker_id="plain", generation=GENERATION, state=wire.WORKER_STATE_READY)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(DecodeService(engine, record, lambda: None), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    model = to_wire(info, wire.ModelInfo).SerializeToString().hex()
    print(f"ready 127.0.0.1:{port} {model}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace=0.5)
    await engine.stop()


def _die(why: str) -> None:
    print(f"the plain engine died: {why}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    asyncio.run(_serve(RachisConfig.model_validate_json(Path(sys.argv[1]).read_text())))
