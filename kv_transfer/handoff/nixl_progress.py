"""How often NIXL's progress thread looks for something to do.

NIXL 1.5's Python interface fixes the interval at 0, and over TCP on one machine the thread then polls without a pause:
each worker burns a whole core while it is idle. Its bindings take an interval in microseconds; this sets it for the
agents that are made while the block runs. With CUDA devices it stays at 0: a core is cheap there, and latency is not.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Bindings:
    """NIXL's bindings, whose agents poll with an interval."""

    def __init__(self, bindings: Any, interval_us: int) -> None:
        self._bindings = bindings
        self._interval_us = interval_us

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 - NIXL's own name
        config.pthrDelay = self._interval_us
        return self._bindings.nixlAgent(name, config)


@contextmanager
def progress_interval(interval_us: int) -> Iterator[None]:
    """NIXL agents made in the block poll every so many microseconds."""
    from nixl._api import nixl_agent

    module: Any = importlib.import_module(nixl_agent.__module__)
    bindings = module.nixlBind
    module.nixlBind = _Bindings(bindings, interval_us)
    try:
        yield
    finally:
        module.nixlBind = bindings
