"""Paged decode attention in Triton: one query token for each request, its KV in blocks that requests may share.

    query        (batch, query heads, head size)      fp16, bf16 or fp32; so are keys, values and the result
    keys, values (blocks, KV heads, block tokens, head size)
    block_table  (batch, most blocks), int32: the blocks of a request, in order; beyond its length anything
    lengths      (batch,), int32: KV tokens of each request, at least one
    result       (batch, query heads, head size)

Several query heads share a KV head (GQA). The blocks of a request are split over programs, each with an online softmax
in fp32; a second kernel combines their parts by their log-sums (flash-decoding). Nothing here looks at what requests
share: whatever sharing saves is saved by the caches. Its results are compared with torch's in Triton's interpreter on a
CPU (test_decode_locality.py); it has not run on a GPU so far, neither for its results nor for its speed.
"""

# Triton's kernels are a language of their own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

# Tensor cores multiply at least so many rows; what is missing is padding.
_LEAST_ROWS = 16


@triton.jit
def attend_kernel(
    query, keys, values, block_table, lengths, part, part_log,
    scale, table_width,
    queries_per_kv: tl.constexpr, rows: tl.constexpr, head_size: tl.constexpr, block_tokens: tl.constexpr,
    splits: tl.constexpr, fp32_products: tl.constexpr,
):  # fmt: skip
    """One request, KV head and split: writes the split's weighted values, normalised, and the log of its sum."""
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    length = tl.load(lengths + request)
    blocks_per_split = tl.cdiv(tl.cdiv(length, block_tokens), splits)
    first = split * blocks_per_split
    end = tl.minimum(first + blocks_per_split, tl.cdiv(length, block_tokens))

    row, dims, tokens = tl.arange(0, rows), tl.arange(0, head_size), tl.arange(0, block_tokens)
    real = row < queries_per_kv
    query_rows = (request * kv_heads + head) * queries_per_kv + row
    q = tl.load(query + query_rows[:, None] * head_size + dims[None, :], mask=real[:, None], other=0.0)
    if fp32_products:
        q = q.to(tl.float32)

    largest = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    weighted = tl.zeros((rows, head_size), tl.float32)
    for index in range(first, end):
        block = tl.load(block_table + request * table_width + index).to(tl.int64)
        valid = index * block_tokens + tokens < length
        places = ((block * kv_heads + head) * block_tokens + tokens[:, None]) * head_size + dims[None, :]
        k = tl.load(keys + places, mask=valid[:, None], other=0.0)
        v = tl.load(values + places, mask=valid[:, None], other=0.0)
        if fp32_products:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        # Never minus infinity: the first token of a block that is read is valid.
        now_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - now_largest[:, None])
        faded = tl.exp(largest - now_largest)
        total = total * faded + tl.sum(weights, 1)
        weighted = weighted * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = now_largest

    # A split beyond the request's end has read nothing; its part gets no weight.
    empty = first >= end
    divisor = tl.where(empty, 1.0, total)
    part_rows = query_rows * splits + split
    tl.store(part + part_rows[:, None] * head_size + dims[None, :], weighted / divisor[:, None], mask=real[:, None])
    tl.store(part_log + part_rows, tl.where(empty, float("-inf"), largest + tl.log(divisor)), mask=real)


@triton.jit
def combine_kernel(part, part_log, result, head_size: tl.constexpr, splits: tl.constexpr):
    """One query head: its splits' parts, weighted by their sums."""
    row = tl.program_id(0)
    split, dims = tl.arange(0, splits), tl.arange(0, head_size)
    logs = tl.load(part_log + row * splits + split)
    weights = tl.exp(logs - tl.max(logs, 0))
    parts = tl.load(part + (row * splits + split[:, None]) * head_size + dims[None, :])
    combined = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(result + row * head_size + dims, combined.to(result.dtype.element_ty))


class PagedDecode:
    """Attention of batches of one size, with the memory that a call needs. splits: a power of two. fp32_products:
    multiply in fp32 instead of the type of the KV; Triton's interpreter (3.7) cannot multiply bf16."""

    def __init__(
        self, batch: int, query_heads: int, kv_heads: int, head_size: int, splits: int, device: str,
        *, fp32_products: bool = False,
    ) -> None:  # fmt: skip
        self._shape = (batch, query_heads, kv_heads, head_size, splits)
        self._fp32_products = fp32_products
        rows = batch * query_heads * splits
        self._part = torch.empty((rows, head_size), dtype=torch.float32, device=device)
        self._part_log = torch.empty(rows, dtype=torch.float32, device=device)

    def __call__(self, query: Any, keys: Any, values: Any, block_table: Any, lengths: Any, result: Any) -> None:
        """All contiguous; block tokens and head size are powers of two from 16 on. Writes `result`."""
        batch, query_heads, kv_heads, head_size, splits = self._shape
        queries_per_kv = query_heads // kv_heads
        attend_kernel[(batch, kv_heads, splits)](
            query, keys, values, block_table, lengths, self._part, self._part_log,
            head_size**-0.5, block_table.shape[1],
            queries_per_kv=queries_per_kv, rows=max(_LEAST_ROWS, triton.next_power_of_2(queries_per_kv)),
            head_size=head_size, block_tokens=keys.shape[2], splits=splits,
            fp32_products=self._fp32_products,
        )  # fmt: skip
        combine_kernel[(batch * query_heads,)](
            self._part, self._part_log, result, head_size=head_size, splits=splits
        )  # fmt: skip


def reference(query: Any, keys: Any, values: Any, block_table: Any, lengths: Any) -> Any:
    """The same, request by request, in fp32 and without blocks."""
    rows = []
    for request, length in enumerate(lengths.tolist()):
        blocks = block_table[request, : -(-length // keys.shape[2])].long()
        k, v = (each[blocks].float().transpose(0, 1).flatten(1, 2)[:, :length] for each in (keys, values))
        q = query[request].float().unflatten(0, (keys.shape[1], -1))
        weights = torch.softmax(q @ k.transpose(1, 2) * query.shape[2] ** -0.5, dim=-1)
        rows.append((weights @ v).flatten(0, 1))
    return torch.stack(rows)
