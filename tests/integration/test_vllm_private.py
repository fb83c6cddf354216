"""Loud on another vLLM: every private field that `kv_transfer.vllm_private` touches, on a real engine's classes."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster_core.clock import UnixMs, unix_ms
from kv_transfer import vllm_private

pytestmark = pytest.mark.integration


def test_the_installed_vllm_is_the_one_the_private_fields_were_read_from() -> None:
    from vllm import __version__

    assert __version__.split("+")[0] == vllm_private.SUPPORTED_VLLM


def test_connector_fields_exist_where_they_are_touched() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, pull_worker

    scheduler = inspect.getsource(base_scheduler.NixlBaseConnectorScheduler)
    assert "self._reqs_need_send" in scheduler
    assert "meta.reqs_to_send = self._reqs_need_send" in scheduler
    assert callable(base_scheduler.NixlBaseConnectorScheduler._stop_heartbeat)
    # An expiry that is sent again replaces the one before: this is how a lease is ended early.
    assert "self._reqs_to_send[req_id] = expiration_time" in inspect.getsource(pull_worker.NixlPullConnectorWorker)


def test_model_runner_methods_exist_where_they_are_wrapped() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    assert callable(CPUModelRunner._sample)
    source = inspect.getsource(CPUModelRunner._bookkeeping_sync)
    assert "gen.set_offset(gen.get_offset() - 4)" in source, "vLLM repaired it: SeededChunkedPrefill can go"


def test_discarded_draws_leave_the_generator_as_it_was() -> None:
    class Runner:
        """As much of a model runner as the mixin wraps: it draws for every row and rewinds what is discarded."""

        def __init__(self) -> None:
            generators = {0: torch.Generator().manual_seed(1), 1: torch.Generator().manual_seed(2)}
            self.input_batch = SimpleNamespace(num_reqs=2, generators=generators)
            self.discard_request_mask = SimpleNamespace(np=[True, False])

        def _sample(self) -> list[float]:
            return [torch.rand(1, generator=each).item() for each in self.input_batch.generators.values()]

        def _bookkeeping_sync(self) -> list[int]:
            return sorted(self.input_batch.generators)

    runner: Any = Runner()
    vllm_private.allow_seeded_chunked_prefill(runner)
    first, second = runner._sample(), runner._sample()
    assert first[0] == second[0], "the row that is not done draws the same again"
    assert first[1] != second[1], "the row that is done goes on"
    assert runner._bookkeeping_sync() == [1]
    assert sorted(runner.input_batch.generators) == [0, 1]


def test_a_pull_that_ended_after_its_deadline_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

    from kv_transfer.engine_connector import RachisNixlConnector

    results = KVConnectorTransferResults(finished_recving={"late", "timely", "local"})
    monkeypatch.setattr(NixlPullConnector, "get_transfer_results", lambda self, finished: results)
    connector = RachisNixlConnector.__new__(RachisNixlConnector)
    now = unix_ms()
    connector._deadlines = {"late": UnixMs(now - 1), "timely": UnixMs(now + 60_000)}
    assert connector.get_transfer_results(set()).failed_recving == {"late"}
    assert connector._deadlines == {}
