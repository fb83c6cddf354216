"""Loud on another vLLM: every private field that `kv_transfer.vllm_private` touches, on a real engine's classes."""

import importlib
import inspect
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from cluster_core.clock import monotonic_s
from kv_transfer import vllm_private
from kv_transfer.tiers import device_pool

if TYPE_CHECKING:
    from tests.campaign.fuzz.simulated_engine import SimulatedEngine

pytestmark = pytest.mark.integration
BLOCK_SIZE = 16


def test_the_installed_vllm_is_the_one_the_private_fields_were_read_from() -> None:
    from vllm import __version__

    assert __version__.split("+")[0] == vllm_private.SUPPORTED_VLLM


def test_connector_fields_exist_where_they_are_touched() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, pull_worker

    scheduler = inspect.getsource(base_scheduler.NixlBaseConnectorScheduler)
    assert "self._reqs_need_send" in scheduler
    assert "meta.reqs_to_send = self._reqs_need_send" in scheduler
    assert callable(base_scheduler.NixlBaseConnectorScheduler._stop_heartbeat)
    base = inspect.getsource(KVConnectorBase_V1)
    assert "self._vllm_config = vllm_config" in base
    assert "self._connector_metadata = connector_metadata" in base, "bound before each step"
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
    now_s = monotonic_s()
    connector._deadlines = {"late": now_s - 0.001, "timely": now_s + 60}
    assert connector.get_transfer_results(set()).failed_recving == {"late"}
    assert connector._deadlines == {}


def test_private_methods_exist_where_subclasses_override_them() -> None:
    from vllm.v1.core.block_pool import BlockPool

    classes: dict[str, Any] = {"BlockPool": BlockPool, "Scheduler": Scheduler}
    for file, names in vllm_private.OVERRIDDEN.items():
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        own = {name: each for each in vars(module).values() if isinstance(each, type) for name in vars(each)}
        for name in names:
            owner, _, method = name.partition(".")
            assert callable(getattr(classes[owner], method)), name
            assert method in own, f"{file} overrides {name} no more"


def test_block_events_are_published_where_they_are_taken_over() -> None:
    from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    stepping = inspect.getsource(Scheduler.update_from_output)
    assert "events = self.kv_cache_manager.take_events()" in stepping
    assert "self.kv_event_publisher.publish(batch)" in stepping
    assert "self.kv_event_queue" in inspect.getsource(BlockPool.take_events)
    assert callable(KVCacheManager.take_events)
    assert isinstance(BlockHashToBlockMap()._cache, dict)
    # The trap that `TieredBlockPool.cache_full_blocks` goes around: a masked event has the tokens of all blocks.
    caching = inspect.getsource(BlockPool.cache_full_blocks)
    assert "end_token_idx = num_full_blocks * block_size" in caching
    assert "block_mask is not None and not block_mask[i]" in caching
    assert "_emit_block_removed_events" in inspect.getsource(BlockPool._maybe_evict_cached_block)


# What the streaming scheduler and host swap touch.

SCHEDULER_METHODS = (
    "_enqueue_waiting_request",
    "_free_request_blocks",
    "_handle_blocked_waiting_request",
    "_preempt_request",
    "_request_blocks_can_be_freed",
    "_update_after_schedule",
    "add_request",
    "finish_requests",
    "schedule",
    "update_from_output",
)
SCHEDULER_FIELDS: dict[str, type | tuple[type, ...]] = {
    "_inflight_prefills": set,
    "block_size": int,
    "deferred_frees": deque,
    "deferred_waiting": set,
    "finished_recving_kv_req_ids": set,
    "hash_block_size": int,
    "kv_holding_waiting": RequestQueue,
    "max_num_active_reqs": int,
    "max_num_scheduled_tokens": int,
    "num_waiting_for_streaming_input": int,
    "prev_step_scheduled_req_ids": set,
    "requests": dict,
    "requires_kv_delivery": bool,
    "reset_preempted_req_ids": set,
    "running": list,
    "sched_step_seq": int,
    "scheduler_reserve_full_isl": bool,
    "use_v2_model_runner": bool,
    "waiting": RequestQueue,
}
REQUEST_FIELDS: dict[str, type] = {
    "_all_token_ids": list,
    "block_hashes": list,
    "drop_stale_output": bool,
    "is_prefill_chunk": bool,
    "num_computed_tokens": int,
    "num_output_placeholders": int,
    "num_output_tokens": int,
    "num_preemptions": int,
    "num_prompt_tokens": int,
    "num_stale_output_tokens": int,
    "prompt_token_ids": list,
    "spec_token_ids": list,
}


@pytest.fixture(scope="module")
def stock() -> "SimulatedEngine":
    """vLLM's own scheduler, with one request that waits."""
    from tests.campaign.fuzz.simulated_engine import SimulatedEngine, World

    engine = SimulatedEngine(World(), Scheduler)
    engine.add("r", list(range(40)))
    return engine


@pytest.mark.parametrize("name", SCHEDULER_METHODS)
def test_scheduler_methods_exist_where_they_are_called_or_wrapped(name: str) -> None:
    assert callable(getattr(Scheduler, name))


@pytest.mark.parametrize("name", SCHEDULER_FIELDS)
def test_scheduler_fields_are_what_they_were(stock: "SimulatedEngine", name: str) -> None:
    assert isinstance(getattr(stock.scheduler, name), SCHEDULER_FIELDS[name])


@pytest.mark.parametrize("name", REQUEST_FIELDS)
def test_request_fields_are_what_they_were(stock: "SimulatedEngine", name: str) -> None:
    assert isinstance(getattr(stock.scheduler.requests["r"], name), REQUEST_FIELDS[name])


def test_request_counts_its_tokens_in_the_two_properties_that_are_replaced(stock: "SimulatedEngine") -> None:
    assert isinstance(Request.num_tokens, property)
    assert isinstance(Request.num_tokens_with_spec, property)
    hashing = inspect.getsource(get_request_block_hasher)
    assert "request.num_tokens" in hashing, "a token that is held back must not be hashed"
    request = stock.scheduler.requests["r"]
    assert len(request.block_hashes) == 40 // stock.scheduler.hash_block_size


def test_statuses_that_are_borrowed_exist_and_are_skipped_by_the_stock_scheduler() -> None:
    for status in (RequestStatus.WAITING_FOR_STREAMING_REQ, RequestStatus.WAITING_FOR_REMOTE_KVS):
        assert Scheduler._is_blocked_waiting_status(status)
        assert not RequestStatus.is_finished(status)


def test_blocks_lie_where_they_are_read_and_cut(stock: "SimulatedEngine") -> None:
    stock.turn()
    stock.add("r2", list(range(100)), 3)
    stock.turn()
    cache = stock.scheduler.kv_cache_manager
    (manager,) = cache.coordinator.single_type_managers
    assert [block.block_id for block in manager.req_to_blocks["r2"]] == list(cache.get_block_ids("r2")[0])
    assert manager.num_cached_block["r2"] == 6
    assert manager.block_size == BLOCK_SIZE
    assert isinstance(cache.watermark_blocks, int)
    pool = cache.block_pool
    assert vllm_private.pool_of(stock.scheduler) is pool
    assert pool.num_gpu_blocks == stock.world.blocks
    published, own = manager.req_to_blocks["r2"][0], manager.req_to_blocks["r2"][-1]
    assert not pool.is_block_writable(published)
    assert pool.is_block_writable(own)
    assert own.ref_cnt == 1
    blocks, tokens, _ = cache.get_computed_blocks(stock.request("r3", list(range(100)), 1))
    assert (tokens, vllm_private.blocks_in_use(blocks)) == (96, 6)
    stock.drain()


def test_looking_up_a_prefix_changes_nothing(stock: "SimulatedEngine") -> None:
    stock.add("r4", list(range(100)))
    stock.drain()
    free = [block.block_id for block in vllm_private.pool_of(stock.scheduler).free_block_queue.get_all_free_blocks()]
    stock.scheduler.kv_cache_manager.get_computed_blocks(stock.request("r5", list(range(100)), 1))
    after = [block.block_id for block in vllm_private.pool_of(stock.scheduler).free_block_queue.get_all_free_blocks()]
    assert free == after


def test_truncating_gives_up_a_published_block_as_a_whole(stock: "SimulatedEngine") -> None:
    scheduler = stock.scheduler
    stock.add("r6", list(range(200, 290)), 2)
    stock.turn()
    request, free = scheduler.requests["r6"], stock.free_blocks()
    assert vllm_private.truncate_blocks(scheduler, request, 85) == 85, "nobody else reads the last block"
    assert vllm_private.truncate_blocks(scheduler, request, 40) == 32
    assert len(vllm_private.request_blocks(scheduler, "r6")) == 2
    assert stock.free_blocks() == free + 4
    assert vllm_private.truncate_blocks(scheduler, request, 0) == 0
    assert vllm_private.request_blocks(scheduler, "r6") == []
    stock.abort("r6")
    stock.drain()


def test_the_accessors_of_the_streaming_scheduler_do_what_their_names_say(stock: "SimulatedEngine") -> None:
    scheduler = stock.scheduler
    stock.add("r7", list(range(300, 340)), 3)
    request = scheduler.requests["r7"]
    assert vllm_private.token_ids(request) is request._all_token_ids
    assert vllm_private.is_ready(scheduler, request)
    stock.turn()
    assert vllm_private.may_free_blocks(scheduler, request)
    scheduler.running.remove(request)
    vllm_private.preempt(scheduler, request, 0.0, drop_stale_output=False)
    assert (request.status, vllm_private.request_blocks(scheduler, "r7")) == (RequestStatus.PREEMPTED, [])
    scheduler.waiting.remove_requests([request])
    vllm_private.free_blocks(scheduler, request)
    vllm_private.enqueue(scheduler, request)
    assert request in scheduler.waiting
    stock.drain()


def test_no_private_method_is_overridden_that_the_list_leaves_out() -> None:
    from decode_worker.engine_scheduler import DecodeScheduler
    from kv_transfer.claims.block_events import EventfulBlockPool
    from kv_transfer.engine_connector import RachisNixlConnector
    from prefill_worker.engine_scheduler import AsyncStreamingScheduler, StreamingScheduler
    from prefill_worker.streaming_request import StreamingRequest
    from tests.pure.kv_transfer.test_vllm_private import named

    overridden: dict[str, set[str]] = {}
    for kind in (
        AsyncStreamingScheduler,
        DecodeScheduler,
        EventfulBlockPool,
        RachisNixlConnector,
        StreamingRequest,
        StreamingScheduler,
        device_pool.TieredBlockPool,
    ):
        theirs = {name for each in kind.__mro__ if each.__module__.startswith("vllm.") for name in vars(each)}
        for each in kind.__mro__:
            private = {name for name in vars(each) if name.startswith("_") and not name.startswith("__")}
            if not each.__module__.startswith("vllm.") and private & theirs - {"_abc_impl"}:
                overridden.setdefault(each.__module__, set()).update(private & theirs - {"_abc_impl"})
    assert overridden == named()


def test_the_stock_scheduler_counts_parked_sessions_as_places_of_the_model_runner() -> None:
    source = inspect.getsource(Scheduler.schedule)
    assert "len(self.running) + self.num_waiting_for_streaming_input" in source
    assert "preempted_req_ids=self.reset_preempted_req_ids" in source


def test_both_model_runners_take_a_known_request_that_comes_as_new() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2ModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1ModelRunner

    assert "self._update_streaming_request(req_id, new_req_data)" in inspect.getsource(V1ModelRunner._update_states)
    assert "finished_req_ids.union(preempted_req_ids)" in inspect.getsource(V2ModelRunner)


def test_copies_of_host_swap_run_before_the_step() -> None:
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import kv_connector

    for module in (gpu_model_runner, kv_connector):
        assert "handle_preemptions(kv_connector_metadata)" in inspect.getsource(module)


def test_the_engine_lets_a_session_in_by_the_side_door() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    assert {"request_id", "prompt", "params", "supported_tasks"} <= set(
        inspect.signature(InputProcessor.process_inputs).parameters
    )
    assert callable(InputProcessor.assign_request_id)
    assert list(inspect.signature(OutputProcessor.add_request).parameters)[:5] == [
        "self",
        "request",
        "prompt",
        "parent_req",
        "request_index",
    ]
    assert "self.request_block_hasher" in inspect.getsource(EngineCore)


def test_layers_are_grouped_into_one_view_of_their_blocks() -> None:
    """What host swap copies: whole blocks, whatever the layout of a layer's tensor."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=4, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=5, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a", "b"], spec)])
    assert vllm_private.has_one_full_attention_group(config)
    caches = {name: torch.zeros(5, 2, BLOCK_SIZE, 2, 4) for name in ("a", "b")}
    views = vllm_private.block_views(config, caches)
    assert [tuple(view.shape) for view in views] == [(5, spec.page_size_bytes)] * 2
    views[1][3] = 1
    assert bool(caches["b"][3].view(torch.int8).all())
    assert not caches["b"][2].any()
    assert not caches["a"].any()


def test_the_free_queue_of_the_tiers_has_every_method_that_vllm_calls() -> None:
    from vllm.v1.core import kv_cache_utils

    # One more is for vLLM's own offloading, which is not used together with the tiers.
    theirs = {name for name in vars(kv_cache_utils.FreeKVCacheBlockQueue) if not name.startswith("_")}
    theirs -= {"iter_blocks_after"}
    assert theirs == {"popleft", "popleft_n", "remove", "append", "append_n", "prepend_n", "get_all_free_blocks"}
    assert all(callable(getattr(device_pool.TieredFreeQueue, name)) for name in theirs)
    assert "self.num_free_blocks" in inspect.getsource(kv_cache_utils.FreeKVCacheBlockQueue.__init__)


def test_the_block_pool_has_the_methods_that_the_tiers_override() -> None:
    from vllm.v1.core.block_pool import BlockPool

    for name in ("cache_full_blocks", "reset_prefix_cache", "_remove_cached_block_hashes"):
        ours = inspect.signature(getattr(device_pool.TieredBlockPool, name)).parameters
        assert list(inspect.signature(getattr(BlockPool, name)).parameters) == list(ours), name
    # Whatever takes a hash from a block goes through what is overridden.
    assert "_remove_cached_block_hashes(" in inspect.getsource(BlockPool._maybe_evict_cached_block)
    assert list(inspect.signature(BlockPool._insert_block_hash).parameters)[:3] == [
        "self",
        "block_hash_with_group_id",
        "block",
    ]


def test_the_scheduler_asks_the_connector_whether_to_go_on_and_hands_it_the_workers_reports() -> None:
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    assert "self.connector.has_pending_push_work()" in inspect.getsource(Scheduler.has_requests)
    assert "self.connector.update_connector_output(" in inspect.getsource(Scheduler._update_from_kv_xfer_finished)
    source = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert "build_connector_worker_meta()" in source
    assert "num_external_cached_tokens" in inspect.getsource(Scheduler.schedule)


def test_blocks_that_copies_alone_hold_are_counted_once_each() -> None:
    blocks = [SimpleNamespace(block_id=number, ref_cnt=count) for number, count in enumerate((0, 1, 2, 2))]
    # The second is held by a copy alone, the third by two of them, the last by a copy and a request.
    held = [blocks[1], blocks[2], blocks[2], blocks[3]]
    scheduler = SimpleNamespace(
        connector=SimpleNamespace(host_tier=SimpleNamespace(held_blocks=lambda: held)),
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(blocks=blocks)),
    )
    assert vllm_private.blocks_held_by_copies(scheduler) == 2
    scheduler.connector.host_tier = None
    assert vllm_private.blocks_held_by_copies(scheduler) == 0
