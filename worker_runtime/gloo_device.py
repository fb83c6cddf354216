"""One device of gloo for all process groups of an engine that is one process.

vLLM makes 13 groups in each engine's process, also where it is alone in all of them. torch gives each a device of its
own, whose thread wakes up 100 times a second for as long as the engine lives: of an idle worker a third of its CPU
time. A device serves any number of groups.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from worker_runtime.addresses import LOOPBACK_INTERFACE


@contextmanager
def one_gloo_device() -> Iterator[None]:
    """The groups that are made inside the block share it. Their ranks are all on one host, as an engine's are."""
    from torch.distributed import distributed_c10d, is_gloo_available

    if not is_gloo_available():
        yield
        return
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    device = ProcessGroupGloo.create_device(interface=LOOPBACK_INTERFACE)

    class SharingGroup(ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            # As torch's other constructor makes them, but for the device, which no public name leads to.
            options: Any = ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    # There is no other way in: torch takes the class from its module, and no option of `init_process_group` for gloo.
    distributed_c10d.ProcessGroupGloo = SharingGroup
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = ProcessGroupGloo
