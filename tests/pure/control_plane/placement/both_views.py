"""Workers that do both as a request finds them, by what differs from idle ones."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cluster_core.ids import WorkerId
from control_plane.model.worker_snapshot import WorkerSnapshot
from control_plane.placement.by_objective import BothView, Choice, Objectives, Way
from tests.pure.control_plane.placement.router_world import DECODE

COLUMNS = {
    "cached_tokens": 0.0,
    "host_tokens": 0.0,
    "own_s": 0.1,
    "queue_s": 0.0,
    "step_s": 0.0,
    "least_s": 0.0,
    "in_step_s": 0.0,
    "step_with_s": 0.01,
    "alone_s": 0.01,
    "wait_s": 0.0,
    "fits_after_s": 0.5,
    "pull_s": 0.02,
    "arriving_s": 0.0,
}


def view(*workers: dict[str, float]) -> BothView:
    """Of each worker what differs from an idle one; `heavy` and `passes` too."""
    columns: dict[str, Any] = {
        name: np.array([each.get(name, usual) for each in workers], dtype=float) for name, usual in COLUMNS.items()
    }
    return BothView(
        workers=[WorkerSnapshot(WorkerId(f"w{row}"), 1, DECODE, f"host:{row}") for row in range(len(workers))],
        prompt_tokens=1000,
        answer_tokens=100,
        is_prefill_heavy=np.array([bool(each.get("heavy", 0)) for each in workers]),
        passes=np.array([bool(each.get("passes", 1)) for each in workers]),
        is_trial=np.zeros(len(workers), dtype=np.bool_),
        **columns,
    )


def first_choice(
    choices: Callable[[BothView, Objectives], list[Choice]], objectives: Objectives, *workers: dict[str, float]
) -> tuple[Way, float]:
    """Of such workers: its way, and when its first token is expected."""
    best = choices(view(*workers), objectives)[0]
    return best.way, best.ttft_s
