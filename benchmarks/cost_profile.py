"""What recomputing and what swapping costs on this machine: the measurement behind `rachis profile`.

Source: Stream2LLM (arXiv:2604.16395), section 4.3. Two curves over powers of two from 16 tokens on: prefill of a prompt
that nobody has seen before, by an idle engine, from its first step to its first token; and the copy of as many blocks
between device and host memory, each way, from and to places drawn at random, as blocks lie after a while in service.

Each size is run once before anything counts, then `repetitions` times; the curve's point is the median. A size is left
out, with all above it, when it would not end in time by the time that the one before took; the copies end with the
largest victim that `tiers.host_gib` could hold. Beyond its end a curve goes on with its last slope.
"""

import gc
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring_process import Reports, in_process_engine, run_measurement
from cluster_configs.preemption_costs import CostModel, LatencyCurve
from cluster_configs.schema import RachisConfig
from cluster_core.clock import monotonic_s
from cluster_core.engine import Engine
from cluster_core.engine_jobs import EngineJob, SamplingSpec
from cluster_core.engine_reports import EngineInfo
from worker_runtime.engine_settings import EngineRole

if TYPE_CHECKING:
    from worker_runtime.vllm_engine import VllmEngine

SMALLEST_TOKENS = 16
# Since the process began. With the engine's start, all of it stays under five minutes.
PREFILL_UNTIL_S = 200.0
COPY_UNTIL_S = 270.0
# Doubling a prompt takes at most four times as long: attention is quadratic.
_GROWTH = 4.0

MeasureMs = Callable[[int], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """An engine's KV memory: bytes of one block in each layer, blocks in all, tokens of one block."""

    layer_bytes: tuple[int, ...]
    blocks: int
    block_size_tokens: int

    @property
    def block_bytes(self) -> int:
        return sum(self.layer_bytes)

    def host_slots(self, host_bytes: int) -> int:
        """Blocks that host memory of that size holds, and the device could fill; at least one, so that it can be
        measured."""
        return max(1, min(host_bytes // self.block_bytes, self.blocks))


def prompt_sizes(max_model_len: int) -> list[int]:
    """Powers of two up to the longest prompt, which leaves room for one token, and that one itself."""
    longest = max_model_len - 1
    sizes = []
    size = SMALLEST_TOKENS
    while size < longest:
        sizes.append(size)
        size *= 2
    return [*sizes, longest]


def copy_sizes(sizes: Sequence[int], layout: BlockLayout, slots: int) -> list[int]:
    """Those of the sizes whose blocks fit the host's slots; the smallest in any case."""
    return [sizes[0], *(size for size in sizes[1:] if blocks_of(size, layout) <= slots)]


def blocks_of(tokens: int, layout: BlockLayout) -> int:
    return -(-tokens // layout.block_size_tokens)


async def measure_curve(
    sizes: Sequence[int],
    repetitions: int,
    measure_ms: MeasureMs,
    left_s: Callable[[], float],
    done: Callable[[int], None],
) -> dict[int, list[float]]:
    """Milliseconds by size, ascending. The smallest is measured whatever time is left."""
    samples: dict[int, list[float]] = {}
    spent_s = 0.0
    for size in sizes:
        before_s = left_s()
        if samples and spent_s * _GROWTH > before_s:
            break
        await measure_ms(size)
        done(1)
        samples[size] = []
        for _ in range(repetitions):
            samples[size].append(await measure_ms(size))
            done(1)
        spent_s = before_s - left_s()
    done((len(sizes) - len(samples)) * (repetitions + 1))
    return samples


def prefill_measure(engine: Engine, info: EngineInfo, rng: random.Random) -> MeasureMs:
    """Prefill of a random prompt, of which nothing is in the prefix cache."""
    sampling = SamplingSpec(max_tokens=1, temperature=0.0, ignore_eos=True)

    async def measure_ms(size: int) -> float:
        prompt = tuple(rng.randrange(info.vocabulary_size) for _ in range(size))
        job = EngineJob(f"profile-{size}-{rng.getrandbits(64):x}", prompt, sampling)
        outputs = [output async for output in engine.generate(job)]
        return outputs[0].prefill_ms

    return measure_ms


def copy_measures(
    layout: BlockLayout, slots: int, copies: Any, wait: Callable[[], None], rng: random.Random
) -> tuple[MeasureMs, MeasureMs]:
    """(out, in): copies of a victim's blocks by `copies`, a `HostPool` of so many device blocks and host slots."""

    def places(size: int) -> list[int]:
        return rng.sample(range(slots), min(slots, blocks_of(size, layout)))

    def timed_ms(copy: Callable[[Sequence[int], Sequence[int]], None], size: int) -> float:
        source, target = places(size), places(size)
        wait()
        began_s = monotonic_s()
        copy(source, target)
        wait()
        return (monotonic_s() - began_s) * 1000

    async def out_ms(size: int) -> float:
        return timed_ms(copies.copy_out, size)

    async def in_ms(size: int) -> float:
        return timed_ms(copies.copy_in, size)

    return out_ms, in_ms


async def profile(arguments: dict[str, Any], reports: Reports) -> dict[str, Any]:
    """Writes the profile of `RachisConfig` "config" to "output", with "repetitions" and "seed"."""
    began_s = monotonic_s()
    config = RachisConfig.model_validate(arguments["config"])
    repetitions, rng = arguments["repetitions"], random.Random(arguments["seed"])

    def until(end_s: float) -> Callable[[], float]:
        return lambda: end_s - (monotonic_s() - began_s)

    async with in_process_engine(config, EngineRole.ALONE, reports) as (engine, info):
        layout = await _layout(engine, info)
        slots = layout.host_slots(int(config.tiers.host_gib * 2**30))
        sizes = prompt_sizes(info.max_model_len)
        copied = copy_sizes(sizes, layout, slots)
        reports.total((len(sizes) + 2 * len(copied)) * (repetitions + 1))
        reports.phase("prefill")
        measure_ms = prefill_measure(engine, info, rng)
        recompute = await measure_curve(sizes, repetitions, measure_ms, until(PREFILL_UNTIL_S), reports.done)
    del engine
    out_ms, in_ms = _real_copies(config.engine.device, layout, slots, rng)
    reports.phase("copy to host memory")
    swap_out = await measure_curve(copied, repetitions, out_ms, until(COPY_UNTIL_S), reports.done)
    reports.phase("copy to the device")
    swap_in = await measure_curve(copied, repetitions, in_ms, until(COPY_UNTIL_S), reports.done)
    metadata = {
        "model": config.model.served_name,
        "device": config.engine.device,
        "dtype": info.dtype,
        "threads": config.engine.threads,
        "max_batched_tokens": config.engine.max_batched_tokens,
        "block_size_tokens": layout.block_size_tokens,
        "block_bytes": layout.block_bytes,
        "repetitions": repetitions,
        "took_s": round(monotonic_s() - began_s, 1),
    }
    model = CostModel(LatencyCurve(recompute), LatencyCurve(swap_out), LatencyCurve(swap_in), metadata)
    model.save(Path(arguments["output"]))
    return {}


async def _layout(engine: "VllmEngine", info: EngineInfo) -> BlockLayout:
    from kv_transfer import vllm_private

    cache = await engine.look(lambda work: vllm_private.scheduler_of(work.engine).kv_cache_config)
    pages = [group.kv_cache_spec.page_size_bytes for group in cache.kv_cache_groups for _ in group.layer_names]
    return BlockLayout(tuple(pages), cache.num_blocks, info.block_size_tokens)


def _real_copies(device: str, layout: BlockLayout, slots: int, rng: random.Random) -> tuple[MeasureMs, MeasureMs]:
    """Copies through the pool that preemption uses, over memory of the engine's sizes. The engine is gone by then."""
    import torch

    from kv_transfer.host_memory.host_pool import HostPool

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    memory = [torch.zeros((slots, each), dtype=torch.int8, device=device) for each in layout.layer_bytes]
    # On a CPU a copy has ended when the call returns.
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    pool = HostPool(memory, slots)
    # The first write to memory pays for getting its pages, and a service runs on after that.
    pool.copy_out(range(slots), range(slots))
    return copy_measures(layout, slots, pool, wait, rng)


if __name__ == "__main__":
    run_measurement(profile)
