"""The groups of one engine share a device of gloo, and answer as torch's own do."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.counting import gloo_loops

_GROUPS = 5


def rank_in_shared_groups(rank: int, ranks: int, store: str) -> tuple[list[float], int, int, str]:
    """(what the groups sum up to, loops, loops after one more group that is torch's own, the class that torch has)"""
    import torch
    from torch import distributed

    from worker_runtime.gloo_device import one_gloo_device

    sums = []
    with one_gloo_device():
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        for _ in range(_GROUPS):
            group = distributed.new_group(list(range(ranks)), backend="gloo")
            value = torch.tensor([float(rank + 1)])
            distributed.all_reduce(value, group=group)
            sums.append(value.item())
    shared = gloo_loops()
    distributed.barrier(group=distributed.new_group(list(range(ranks)), backend="gloo"))
    return sums, shared, gloo_loops(), distributed.distributed_c10d.ProcessGroupGloo.__name__


def test_groups_share_one_device_and_sum_up_over_two_ranks(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        running = [processes.submit(rank_in_shared_groups, rank, 2, f"{tmp_path}/store") for rank in range(2)]
        for rank in running:
            sums, shared, with_one_more, own = rank.result(timeout=240)
            assert sums == [3.0] * _GROUPS
            assert shared == 1
            assert with_one_more > shared, "a group that torch makes itself has a loop: the count sees it"
            assert own == "ProcessGroupGloo"
