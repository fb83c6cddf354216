"""Loud on another vLLM: what the streaming scheduler and host swap touch of its scheduler and requests."""

import inspect
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kv_transfer import vllm_private
from kv_transfer.kv_layout import layout_of

if TYPE_CHECKING:
    from tests.campaign.fuzz.simulated_engine import SimulatedEngine

pytestmark = pytest.mark.integration
BLOCK_SIZE = 16

SCHEDULER_METHODS = (
    "_enqueue_waiting_request",
    "_free_request_blocks",
    "_handle_blocked_waiting_request",
    "_inflight_prefill_reserved_blocks",
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
    from tests.campaign.fuzz.simulated_engine import SimulatedEngine
    from tests.campaign.fuzz.worlds import World

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


def test_steps_can_be_looked_into_from_before_them() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

    assert "self.step_fn = (" in inspect.getsource(EngineCore)
    assert "self.engine_core.step_fn()" in inspect.getsource(InprocClient.get_output)
    scheduler = inspect.getsource(Scheduler)
    assert "self.finished_recving_kv_req_ids.add(req_id)" in scheduler
    assert "self.kv_holding_waiting = create_request_queue" in scheduler
    asks = inspect.getsource(mixin.KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert "start_after_forward = not scheduler_output.has_sync_kv_loads" in asks, "pulls begin with steps by now"
    assert asks.index("bind_connector_metadata") < asks.index("start_load_kv"), "what is begun has its metadata"


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
    engine = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
    )
    layout = layout_of(engine, config)
    assert (layout.kinds, layout.is_one_list, layout.has_full_attention) == (("FullAttention",), True, True)
    caches = {name: torch.zeros(5, 2, BLOCK_SIZE, 2, 4) for name in ("a", "b")}
    views = vllm_private.block_views(config, caches)
    assert [tuple(view.shape) for view in views] == [(5, spec.page_size_bytes)] * 2
    views[1][3] = 1
    assert bool(caches["b"][3].view(torch.int8).all())
    assert not caches["b"][2].any()
    assert not caches["a"].any()
