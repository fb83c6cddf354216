"""The thread that computes keeps its cores, whatever making an engine does to them."""

import os

import pytest

from worker_runtime.vllm_start import own_cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores of Linux"
)


def test_thread_that_was_bound_to_a_core_meanwhile_has_all_of_its_cores_again() -> None:
    cores = os.sched_getaffinity(0)
    with own_cores():
        os.sched_setaffinity(0, [max(cores)])
        assert os.sched_getaffinity(0) == {max(cores)}
    assert os.sched_getaffinity(0) == cores


def test_it_has_them_after_a_failed_start_as_well() -> None:
    cores = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="no model"), own_cores():
        os.sched_setaffinity(0, [max(cores)])
        raise ValueError("no model")
    assert os.sched_getaffinity(0) == cores
