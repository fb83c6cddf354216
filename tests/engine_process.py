"""Processes for engines that must not share one: vLLM keeps in its process what two would share.

Each is forked from a server that has loaded vLLM, which takes several times as long as starting the small model.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def engine_processes() -> ForkServerContext:
    """Makes processes that have vLLM loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.loaded_engine"])
    return context


def in_engine_process(
    function: Callable[Parameters, Result], *arguments: Parameters.args, **named: Parameters.kwargs
) -> Result:
    """What the function returns or raises, in a process of its own that ends after it."""
    with ProcessPoolExecutor(1, mp_context=engine_processes()) as process:
        return process.submit(function, *arguments, **named).result()
