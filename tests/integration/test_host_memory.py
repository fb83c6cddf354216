"""Host memory of the tiers and the thread that copies, without an engine: bytes, failures, sizes that cannot be had."""

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from vllm import _custom_ops
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from cluster_core.errors import StartError
from kv_transfer import vllm_private
from kv_transfer.host_memory import batched_copy, host_swap
from kv_transfer.host_memory.batched_copy import Descriptors, Rows, descriptors, driver_copies_all
from kv_transfer.host_memory.copy_worker import BackgroundCopy, CopyReport, CopyWorker
from kv_transfer.host_memory.host_pool import HostPool
from kv_transfer.host_memory.swap_ledger import SwapCopies
from kv_transfer.model_features import KvLayout
from tests.integration.conftest import until

pytestmark = pytest.mark.integration
BLOCKS, SLOTS, BYTES = 6, 4, 64


def device_tensors() -> list[torch.Tensor]:
    return [torch.randint(-128, 127, (BLOCKS, BYTES), dtype=torch.int8) for _ in range(3)]


def out(number: int, *pairs: tuple[int, int]) -> BackgroundCopy:
    return BackgroundCopy(number, SwapCopies(out=pairs))


def back(number: int, *pairs: tuple[int, int]) -> BackgroundCopy:
    return BackgroundCopy(number, SwapCopies(back=pairs))


async def reported(worker: CopyWorker, copies: int) -> CopyReport:
    """Everything reported until so many copies have ended."""
    total = CopyReport()

    async def all_ended() -> bool:
        nonlocal total
        report = worker.report()
        if report is not None:
            joined = total.aggregate(report)
            assert isinstance(joined, CopyReport)
            total = joined
        return total.ended.total() >= copies

    await until(all_ended, f"{copies} copies have ended", timeout_s=60)
    return total


async def test_bytes_come_back_as_they_went_and_every_copy_is_reported_once() -> None:
    device = device_tensors()
    before = [each.clone() for each in device]
    worker = CopyWorker(HostPool(device, SLOTS))
    worker.begin([out(1, (0, 3), (5, 1)), back(2, (2, 1), (4, 3))])
    report = await reported(worker, 2)
    assert report.ended == {1: 1, 2: 1}
    assert not report.failed
    assert report.seconds.keys() == {"out", "back"}
    for now, then in zip(device, before, strict=True):
        assert torch.equal(now[2], then[5])
        assert torch.equal(now[4], then[0])
        assert torch.equal(now[[0, 1, 3, 5]], then[[0, 1, 3, 5]])
    assert worker.report() is None
    worker.close()


async def test_a_copy_that_raises_is_reported_and_the_next_one_runs() -> None:
    worker = CopyWorker(HostPool(device_tensors(), SLOTS))
    worker.begin([out(1, (0, SLOTS)), out(2, (0, 0))])
    report = await reported(worker, 2)
    assert (report.ended, report.failed) == ({1: 1, 2: 1}, {1})
    worker.close()


async def test_a_copy_that_takes_long_is_not_waited_for() -> None:
    may_end = threading.Event()

    class Slow(HostPool):
        def carry_out(self, copies: SwapCopies) -> None:
            may_end.wait(10)

    worker = CopyWorker(Slow(device_tensors(), SLOTS))
    worker.begin([out(1, (0, 0))])
    assert worker.report() is None
    may_end.set()
    assert (await reported(worker, 1)).ended == {1: 1}
    worker.close()


async def test_a_copy_on_a_gpu_that_fails_half_way_is_reported_once_the_rest_has_landed() -> None:
    seen: list[str] = []

    class Fails(HostPool):
        def carry_out(self, copies: SwapCopies) -> None:
            seen.append("enqueued")
            raise RuntimeError("out of descriptors")

    worker = CopyWorker(Fails(device_tensors(), SLOTS))
    # No GPU is there whose stream it could be.
    worker._stream = cast(Any, SimpleNamespace(synchronize=lambda: seen.append("landed")))
    await asyncio.to_thread(worker._thread.submit(worker._carry_out, out(1, (0, 0)), None).exception)
    assert seen == ["enqueued", "landed"]
    worker.close()


def test_a_large_copy_fails_once_none_of_its_parts_is_under_way() -> None:
    others = threading.Event()
    moved: list[int] = []

    def move(batch: Descriptors) -> None:
        if 0 in batch.sources:
            raise ValueError("the first part")
        others.wait(10)
        moved.extend(batch.sources.tolist())

    batch = Descriptors(np.arange(8), np.arange(8), np.full(8, 64 << 10))
    # What moves memory cannot fail otherwise.
    with mock.patch.object(batched_copy, "_move", move):
        threading.Timer(0.05, others.set).start()
        with pytest.raises(ValueError, match="the first part"):
            batched_copy.memmove_all(batch)
    assert moved and len(moved) >= 8 - 8 // 2 and others.is_set()


@pytest.mark.parametrize("gap", [0, 32], ids=["dense", "rows apart"])
@pytest.mark.parametrize("row_bytes", [64, 64 << 10], ids=["small", "large"])
def test_whatever_rows_are_copied_all_others_stay(gap: int, row_bytes: int) -> None:
    """Runs of rows on both sides, in any order; large ones are moved by several threads."""
    rng = np.random.default_rng(0)
    whole = [torch.randint(-128, 127, (24, row_bytes + gap), dtype=torch.int8) for _ in range(3)]
    device = [each[:, :row_bytes] for each in whole]
    pool = HostPool(device, 20)
    for _ in range(20):
        count, start = int(rng.integers(0, 12)), int(rng.integers(0, 8))
        runs = (np.arange(start, start + count), rng.permutation(20)[:count])
        blocks, slots = (rng.permutation(24)[:count] if rng.random() < 0.5 else runs[0]), runs[int(rng.integers(0, 2))]
        before, held = [each.clone() for each in whole], [each.clone() for each in pool.host]
        if rng.random() < 0.5:
            pool.copy_out(blocks.tolist(), slots.tolist())
            for layer, each in enumerate(held):
                each[slots] = before[layer][blocks, :row_bytes]
        else:
            pool.copy_in(slots.tolist(), blocks.tolist())
            for layer, each in enumerate(before):
                each[blocks, :row_bytes] = held[layer][slots]
        assert all(torch.equal(now, then) for now, then in zip(whole, before, strict=True))
        assert all(torch.equal(now, then) for now, then in zip(pool.host, held, strict=True))


def test_rows_that_follow_each_other_on_both_sides_are_one_descriptor() -> None:
    here, there = (Rows.of([torch.zeros((8, 64), dtype=torch.int8)] * 2) for _ in range(2))

    batch = descriptors(here, [2, 1, 5, 6, 0], there, [4, 3, 0, 1, 7])

    assert sorted(batch.sizes.tolist()) == [64, 64, 128, 128, 128, 128]


@pytest.mark.parametrize("slots", [[-1], [SLOTS]])
def test_a_row_that_is_not_there_is_refused_before_anything_is_moved(slots: list[int]) -> None:
    with pytest.raises(IndexError, match="of memory with 4"):
        HostPool(device_tensors(), SLOTS).copy_out([0], slots)


def test_a_gpu_gets_all_copies_in_one_call_of_its_driver() -> None:
    """What is given to vLLM's operation, which this machine has not."""
    given: list[tuple[torch.Tensor, ...]] = []
    with mock.patch.object(_custom_ops, "swap_blocks_batch", lambda *arrays: given.append(arrays)):
        HostPool(device_tensors(), SLOTS, driver_copies_all).copy_out([0, 3], [1, 0])

    ((sources, targets, sizes),) = given
    assert sizes.tolist() == [BYTES] * 6
    assert len(set(sources.tolist())) == len(set(targets.tolist())) == 6
    assert {each.dtype for each in (sources, targets, sizes)} == {torch.int64}


def test_reports_of_several_workers_add_up() -> None:
    first = CopyReport(Counter({1: 1, 2: 1}), {2}, Counter({"out": 1}))
    second = CopyReport(Counter({1: 1}), {1}, Counter({"out": 2, "back": 5}))
    assert first.aggregate(second) == CopyReport(Counter({1: 2, 2: 1}), {1, 2}, Counter({"out": 3, "back": 5}))


def test_more_host_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    slots = psutil.virtual_memory().available // (3 * BYTES) + 2**20
    with pytest.raises(StartError, match=r"tiers\.host_gib.* GiB of host memory are wanted, .* GiB are there"):
        HostPool(device_tensors(), slots)


def test_host_memory_that_cannot_be_had_is_a_clear_error() -> None:
    refused = mock.Mock(side_effect=RuntimeError("can't allocate memory"))
    tensors = device_tensors()
    with (
        mock.patch.object(torch, "empty", refused),
        pytest.raises(StartError, match=r"tiers\.host_gib: 4 blocks .*can't allocate memory"),
    ):
        HostPool(tensors, SLOTS)


@pytest.mark.parametrize(
    ("extra", "slots"),
    [
        ({"rachis_host_bytes": 1000}, 3),
        ({"rachis_host_bytes": 300}, 1),
        ({"rachis_host_bytes": 0}, 0),
        ({}, 0),
        ({"rachis_host_bytes": 1000, "rachis_host_ratio": 0.5}, 8),
        ({"rachis_host_ratio": 0.0}, 0),
        ({"rachis_host_ratio": 2.0}, 32),
    ],
)
def test_capacity_is_given_in_bytes_or_as_a_ratio_of_the_device(extra: dict[str, float], slots: int) -> None:
    assert slots_of(extra) == slots


def test_host_memory_too_small_for_one_block_is_refused_with_both_sizes() -> None:
    with pytest.raises(StartError, match=r"tiers\.host_gib is 299 bytes .* one block takes 300"):
        slots_of({"rachis_host_bytes": 299})


def slots_of(extra: dict[str, float]) -> int:
    transfer = SimpleNamespace(get_from_extra_config=extra.get)
    caches = SimpleNamespace(num_blocks=16, kv_cache_tensors=[SimpleNamespace(size=16 * 300)])
    layout = KvLayout(
        kinds=("FullAttention",),
        is_one_list=True,
        has_full_attention=True,
        keeps_prefixes=True,
        computes_in_pieces=True,
    )
    # A vLLM config of one attention group takes a model to make; this test is about sizes.
    with mock.patch.object(host_swap, "layout_of", lambda *configs: layout):
        return host_swap.slots_of(SimpleNamespace(kv_transfer_config=transfer), caches)


class _Alone:
    """A connector that does nothing itself."""

    def __init__(self, *_: Any) -> None: ...

    def register_kv_caches(self, kv_caches: Any) -> None: ...

    def handle_preemptions(self, kv_connector_metadata: Any) -> None: ...


class _Swapping(host_swap.HostSwapping, _Alone):
    """On the worker's side."""


@pytest.mark.parametrize("kv_role", ["kv_both", "kv_consumer", "kv_producer"])
@pytest.mark.parametrize("copies", [SwapCopies(out=((0, 3),)), SwapCopies(back=((3, 0),)), SwapCopies()])
def test_an_engine_that_pulls_waits_for_what_is_swapped_out(kv_role: Any, copies: SwapCopies) -> None:
    """A pull is on no stream, and may be into those blocks, in the same step."""
    config: Any = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_connector="of a test", kv_role=kv_role),
        cache_config=SimpleNamespace(block_size=16),
    )
    done: list[str] = []
    with (
        # A connector is made by vLLM, and has no ports: what it takes of an engine is left out, and what it does noted.
        mock.patch.object(host_swap, "slots_of", return_value=SLOTS),
        mock.patch.object(vllm_private, "block_views", return_value=device_tensors()),
        mock.patch.object(HostPool, "carry_out", lambda *_: done.append("enqueued")),
        mock.patch.object(HostPool, "wait", lambda *_: done.append("waited")),
    ):
        connector = _Swapping(config, KVConnectorRole.WORKER, cast(Any, None))
        connector.register_kv_caches({})
        connector.handle_preemptions(cast(Any, SimpleNamespace(**{host_swap.COPIES: copies})))
    is_waited_for = bool(copies.out) and kv_role != "kv_producer"
    assert done == ["enqueued", *["waited"] * is_waited_for]
