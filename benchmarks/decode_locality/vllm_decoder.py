"""Decode steps of a plain vLLM engine, timed one by one.

A visit of a shape adds its requests, waits until all are past prefill and have decoded a little, times each of the next
steps, and aborts them. Prefixes stay in the prefix cache between visits, suffixes are new each time; a suffix is as
much shorter than asked for as the request decodes until the middle of the timed steps, so that these read on average
what the shape says. The blocks that requests really share are counted in every visit: where they are not what the shape
says, there is no figure.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.decode_locality.batches import BatchShape, Path, longest_paths
from benchmarks.measuring_process import Reports
from cluster_configs.schema import RachisConfig
from cluster_core.clock import monotonic_s
from cluster_core.errors import NotSupportedError, UnavailableError
from kv_transfer import vllm_private
from kv_transfer.model_features import Feature
from worker_runtime.engine_settings import EngineSettings

TIMED_STEPS = 16
_COLD_STEPS = 2
# Tokens that a request has decoded in the middle of the timed steps.
_DECODED_TOKENS = _COLD_STEPS + TIMED_STEPS // 2
SHORTEST_SUFFIX_TOKENS = _DECODED_TOKENS + 1
# Steps of a prefill that are too many, whatever its chunks.
_MOST_PREFILL_STEPS = 2000


class VllmDecode:
    """One engine in this process, from construction to `stop`. Its environment is set already."""

    name = "vllm"

    def __init__(self, settings: EngineSettings, seed: int, reports: Reports) -> None:
        reports.phase("importing vLLM")
        from vllm import SamplingParams
        from vllm.v1.engine.llm_engine import LLMEngine

        from worker_runtime.vllm_arguments import engine_args, engine_info

        reports.phase("loading the model")
        self._engine: Any = LLMEngine.from_engine_args(engine_args(settings))
        self._scheduler = vllm_private.scheduler_of(self._engine)
        self._info = engine_info(self._engine, settings)
        if reason := self._info.missing_features.get(Feature.DECODE_BATCHES):
            raise NotSupportedError(f"{reason}: what requests share cannot be told")
        self._sampling = SamplingParams(
            max_tokens=self._info.max_model_len, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self._seed = seed
        self._rng = random.Random(seed)
        self._requests = 0
        self._streams: dict[tuple[int, ...], list[int]] = {}
        self.block_size_tokens = self._info.block_size_tokens

    def facts(self) -> dict[str, Any]:
        return {
            "model": self._info.model,
            "dtype": self._info.dtype,
            "block_size_tokens": self.block_size_tokens,
            "kv_bytes_per_token": vllm_private.block_bytes(self._engine) // self.block_size_tokens,
            "timed_steps": TIMED_STEPS,
        }

    def holds(self, shape: BatchShape) -> bool:
        """Whether its requests are short enough and all fit the pool at once."""
        size = self.block_size_tokens
        # Room for what is decoded after the middle, too.
        longest = shape.longest_tokens + TIMED_STEPS
        blocks = shape.reads(size).distinct_tokens // size + 2 * shape.batch
        return longest < self._info.max_model_len and blocks <= vllm_private.block_counts(self._engine)[1]

    def prepare(self, shapes: Iterable[BatchShape]) -> None:
        """Computes all prefixes once."""
        for path in longest_paths(shapes):
            self._decode([self._prefix(path)], 1)
            self._abort()

    def visit(self, shape: BatchShape) -> list[float]:
        """Milliseconds of each timed step. Raises UnavailableError when the requests do not share as they should."""
        prompts = [self._prefix(path) + self._random(shape.suffix_tokens - _DECODED_TOKENS) for path in shape.paths()]
        names = self._decode(prompts, 1 + _COLD_STEPS)
        steps_ms = []
        for _ in range(TIMED_STEPS):
            began_s = monotonic_s()
            self._engine.step()
            steps_ms.append((monotonic_s() - began_s) * 1000)
        self._check(shape, names)
        self._abort()
        return steps_ms

    def stop(self) -> None:
        self._engine.engine_core.shutdown()

    def _decode(self, prompts: Sequence[list[int]], tokens: int) -> list[str]:
        """Adds the prompts and steps until every one has so many tokens at least; their names in the engine."""
        names = []
        for prompt in prompts:
            self._requests += 1
            names.append(self._engine.add_request(f"r{self._requests}", {"prompt_token_ids": prompt}, self._sampling))
        for _ in range(_MOST_PREFILL_STEPS):
            running = self._scheduler.running
            if len(running) == len(prompts) and all(each.num_output_tokens >= tokens for each in running):
                return names
            self._engine.step()
        raise UnavailableError(f"{len(prompts)} requests do not fit the engine at once; see engine.kv_blocks")

    def _check(self, shape: BatchShape, names: Sequence[str]) -> None:
        held = [[each.block_id for each in vllm_private.request_blocks(self._scheduler, name)] for name in names]
        shared = sum(map(len, held)) - len({block for blocks in held for block in blocks})
        reads = shape.reads(self.block_size_tokens)
        expected = (reads.total_tokens - reads.distinct_tokens) // self.block_size_tokens
        if len(self._scheduler.running) != shape.batch or shared != expected:
            raise UnavailableError(f"the requests of {shape} share {shared} blocks, not {expected}")

    def _abort(self) -> None:
        self._engine.abort_request([each.request_id for each in self._scheduler.running], internal=True)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _prefix(self, path: Path) -> list[int]:
        """A segment's tokens follow from its place in the tree, so that a longer one begins like a shorter one."""
        tokens: list[int] = []
        for depth, (_, length) in enumerate(path):
            tokens += self._stream(tuple(index for index, _ in path[: depth + 1]))[:length]
        return tokens

    def _stream(self, name: tuple[int, ...]) -> list[int]:
        if name not in self._streams:
            drawn = np.random.default_rng((self._seed, *name)).integers(
                self._info.vocabulary_size, size=self._info.max_model_len
            )
            self._streams[name] = drawn.tolist()
        return self._streams[name]

    def _random(self, tokens: int) -> list[int]:
        return [self._rng.randrange(self._info.vocabulary_size) for _ in range(tokens)]


def engine_config(config: RachisConfig, shapes: Sequence[BatchShape], pool_blocks: int) -> RachisConfig:
    """One step takes all suffixes of a batch, and on a CPU the pool is as large as the shapes want it; on a GPU it is
    what the configuration says."""
    engine = config.engine
    largest = max(shape.batch for shape in shapes)
    suffixes = max(shape.batch * (shape.suffix_tokens + engine.block_size_tokens) for shape in shapes)
    update = {
        "max_running_requests": max(engine.max_running_requests, largest),
        "max_batched_tokens": max(engine.max_batched_tokens, suffixes),
    }
    if engine.device == "cpu":
        update["kv_blocks"] = max(pool_blocks, -(-engine.max_model_len // engine.block_size_tokens) + 1)
    return config.model_copy(update={"engine": engine.model_copy(update=update)})
