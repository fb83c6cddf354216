"""Decode attention in Triton's interpreter, where Triton is installed, and what torch alone decides."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import pytest

from benchmarks.decode_locality import measure as decode_locality
from benchmarks.decode_locality.batches import QUICK, BatchShape
from cluster_configs.loading import load
from cluster_configs.schema import RachisConfig
from cluster_core.errors import UnavailableError
from tests.process.benchmarks.test_cost_profile import SilentReports


async def test_gpu_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM is installed wherever tests run.
    monkeypatch.setattr(decode_locality, "find_spec", lambda name: None)
    arguments = {"config": RachisConfig().model_dump(mode="json"), "grid": asdict(QUICK), "seed": 0}
    with pytest.raises(UnavailableError, match="vLLM is not installed here"):
        await decode_locality.measure(arguments, SilentReports())
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    gpu = load(profile="gpu-1node").config.model_dump(mode="json")
    with pytest.raises(UnavailableError, match="there is no CUDA device here"):
        await decode_locality.measure(arguments | {"config": gpu}, SilentReports())


# Attention in Triton's interpreter, which has to be chosen before Triton is imported: in a process of its own.


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    pytest.importorskip("triton")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=interpret) as executor:
        yield executor


def interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def largest_error(dtype: str, query_heads: int, kv_heads: int, splits: int, device: str = "cpu") -> float:
    """Of a batch with a partial block, a whole one, shared ones, and one of a single token, against torch."""
    import torch

    from benchmarks.decode_locality.paged_decode_triton import PagedDecode, reference

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    keys, values = (torch.randn(20, kv_heads, 16, 32).to(device, kind) for _ in range(2))
    query = torch.randn(4, query_heads, 32).to(device, kind)
    tables = [[3], [3], [3, 4, 5, 6, 7], [3, 4, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19]]
    table = torch.tensor([each + [-1] * (13 - len(each)) for each in tables], dtype=torch.int32, device=device)
    lengths = torch.tensor([1, 16, 77, 200], dtype=torch.int32, device=device)
    found = torch.empty_like(query)
    # Triton's interpreter cannot multiply bf16.
    in_fp32 = device == "cpu" and dtype == "bfloat16"
    PagedDecode(4, query_heads, kv_heads, 32, splits, device, fp32_products=in_fp32)(
        query, keys, values, table, lengths, found
    )
    return float((found.float() - reference(query, keys, values, table, lengths)).abs().max())


TOLERANCES = (("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 2e-2))


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (8, 2), (20, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("splits", [1, 8])
def test_attention_equals_torch(
    interpreter: ProcessPoolExecutor, dtype: str, tolerance: float, query_heads: int, kv_heads: int, splits: int
) -> None:
    assert interpreter.submit(largest_error, dtype, query_heads, kv_heads, splits).result() < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_attention_on_a_gpu_equals_torch(dtype: str, tolerance: float) -> None:
    pytest.importorskip("triton")
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is no GPU here")
    assert largest_error(dtype, 8, 2, 8, "cuda") < tolerance


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus_that_are_not_here(
    dtype: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from benchmarks.decode_locality import paged_decode_triton as kernels

    sizes = {"head_size": 128, "splits": 4}
    attend_sizes = sizes | {"queries_per_kv": 4, "rows": 16, "block_tokens": 32, "fp32_products": False}
    given = dict.fromkeys(("query", "keys", "values"), f"*{dtype}") | {"block_table": "*i32", "lengths": "*i32"}
    parts = {"part": "*fp32", "part_log": "*fp32"}
    for kernel, types, constants in (
        (kernels.attend_kernel, given | parts | {"scale": "fp32", "table_width": "i32"}, attend_sizes),
        (kernels.combine_kernel, parts | {"result": f"*{dtype}"}, sizes),
    ):
        source = compiler.ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
        assert compiler.compile(source, target=target).asm["cubin"]


def layer_errors(shape: BatchShape) -> list[float]:
    """Of a batch of the measurement, layer by layer: its block tables, splits and layers are those that are timed."""
    import torch

    from benchmarks.decode_locality.paged_decode_triton import reference
    from benchmarks.decode_locality.synthetic_attention import AttentionShape, SyntheticAttention, blocks_of

    torch.manual_seed(0)
    attention = SyntheticAttention(AttentionShape("tiny", 2, 4, 2, 16, "float32"), 8, 0, "cpu", lambda step, steps: [])
    attention.allocate(blocks_of(shape))
    query, table, lengths = attention.batch(shape)
    results = [torch.empty_like(query) for _ in attention.layers]
    attention.step(query, table, lengths, results)()
    return [
        float((found - reference(query, keys, values, table, lengths)).abs().max())
        for found, (keys, values) in zip(results, attention.layers, strict=True)
    ]


@pytest.mark.parametrize(
    "shape",
    [
        BatchShape(1, ((1, 40),), 17),
        BatchShape(5, ((1, 70), (2, 64)), 33, "grouped"),
        BatchShape(5, ((2, 100),), 20, divergent=1, strangers=1),
    ],
)
def test_every_layer_of_a_timed_step_equals_torch(interpreter: ProcessPoolExecutor, shape: BatchShape) -> None:
    errors = interpreter.submit(layer_errors, shape).result()
    assert len(errors) == 2
    assert max(errors) < 1e-5


def test_few_programs_are_split_until_the_device_is_full() -> None:
    pytest.importorskip("torch")
    from benchmarks.decode_locality.synthetic_attention import LLAMA_3_1_8B, splits_of

    assert [splits_of(132, programs) for programs in (8, 64, 128, 256, 512)] == [64, 8, 4, 2, 1]
    assert LLAMA_3_1_8B.kv_bytes_per_token == 131_072
