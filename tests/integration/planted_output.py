"""Bugs of requests that arrive with output (`kv_transfer.handoff.emitted_output`), planted to see them found."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def _no_draws() -> Iterator[None]:
    with mock.patch("kv_transfer.handoff.emitted_output._advance", lambda generator, draws, vocabulary: None):
        yield


@contextmanager
def _one_draw_too_many() -> Iterator[None]:
    from kv_transfer.handoff import emitted_output

    advance = emitted_output._advance
    with mock.patch.object(
        emitted_output, "_advance", lambda generator, draws, size: advance(generator, draws + 1, size)
    ):
        yield


@contextmanager
def rows_without_output() -> Iterator[None]:
    """The scheduler knows of the output, the model runner does not."""
    with mock.patch("kv_transfer.handoff.emitted_output.EmittedRows.add_request", _plain_add_request):
        yield


def _plain_add_request(self: Any, request: Any) -> int:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    row: int = InputBatch.add_request(self, request)
    return row


@contextmanager
def _grammar_at_its_root() -> Iterator[None]:
    with mock.patch("kv_transfer.handoff.emitted_output.EmittedOutput._follows", lambda self, request: True):
        yield


@contextmanager
def _front_end_from_the_start() -> Iterator[None]:
    with mock.patch("kv_transfer.handoff.emitted_output.feed_front_end", lambda engine, name, emitted: None):
        yield


# Of vLLM's V1 model runner: V2 gets the output with the prompt, and draws by position.
PLANTED_IN_ROWS = (_no_draws, _one_draw_too_many, rows_without_output)
PLANTED = (*PLANTED_IN_ROWS, _grammar_at_its_root, _front_end_from_the_start)
