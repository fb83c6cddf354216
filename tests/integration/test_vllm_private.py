"""Loud on another vLLM: its version, and private fields of its connectors, model runners and block pool."""

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler

from cluster_core.clock import monotonic_s
from kv_transfer import model_runners, vllm_private
from kv_transfer.tiers import device_pool

pytestmark = pytest.mark.integration


def test_the_installed_vllm_is_the_one_the_private_fields_were_read_from() -> None:
    from vllm import __version__

    assert __version__.split("+")[0] == vllm_private.SUPPORTED_VLLM


def test_connector_fields_exist_where_they_are_touched() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker, pull_worker

    scheduler = inspect.getsource(base_scheduler.NixlBaseConnectorScheduler)
    assert "self._reqs_need_send" in scheduler
    assert "meta.reqs_to_send = self._reqs_need_send" in scheduler
    assert callable(base_scheduler.NixlBaseConnectorScheduler._stop_heartbeat)
    assert "1 if self._has_mamba" in inspect.getsource(base_scheduler.NixlBaseConnectorScheduler._prefill_backoff)
    assert "meta.reqs_in_batch = self._reqs_in_batch" in scheduler, "what workers lease has to be there"
    assert "self.use_host_buffer" in scheduler
    worker = inspect.getsource(pull_worker.NixlPullConnectorWorker)
    assert "if req_id in self._reqs_to_process:" in worker
    assert "self.tp_rank = get_tensor_model_parallel_rank()" in inspect.getsource(base_worker.NixlBaseConnectorWorker)
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
    model_runners.allow_seeded_chunked_prefill(runner)
    first, second = runner._sample(), runner._sample()
    assert first[0] == second[0], "the row that is not done draws the same again"
    assert first[1] != second[1], "the row that is done goes on"
    assert runner._bookkeeping_sync() == [1]
    assert sorted(runner.input_batch.generators) == [0, 1]


def test_a_pull_that_ended_after_its_deadline_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

    from kv_transfer.engine_connector import RachisNixlConnector
    from kv_transfer.handoff.overdue_pulls import OverduePulls

    results = KVConnectorTransferResults(finished_recving={"late", "timely", "local"})
    monkeypatch.setattr(NixlPullConnector, "get_transfer_results", lambda self, finished: results)
    connector = RachisNixlConnector.__new__(RachisNixlConnector)
    connector._overdue = OverduePulls(lambda transfers: [])
    connector._checks = None
    now_s = monotonic_s()
    connector._deadlines = {"late": now_s - 0.001, "timely": now_s + 60}
    assert connector.get_transfer_results(set()).failed_recving == {"late"}
    assert connector._deadlines == {}


class Agent:
    """Of a NIXL agent, what a pull worker asks of it; a read is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bytes]] = []
        self.read: list[tuple[list[int], list[int]]] = []

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        self.told.append((agent_name, notif_msg))

    def make_prepped_xfer(self, operation: str, _: int, local: Any, __: int, remote: Any, notif_msg: bytes) -> int:
        self.read.append((list(local), list(remote)))
        return 1

    def transfer(self, handle: int) -> None:
        """It never ends."""


def shaking_hands() -> tuple[Any, Any, Any]:
    """A pull worker of vLLM whose handshake with `engine` is done, its connector, and a pull that waited for that."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

    worker: Any = object.__new__(NixlPullConnectorWorker)
    info = SimpleNamespace(
        remote_tp_size=1, remote_dcp_size=1, remote_block_size=16, remote_physical_blocks_per_logical=1
    )
    topology = SimpleNamespace(get_engine_info=lambda _: info, tp_ratio=lambda _: 1, block_size_ratio=lambda _: 1)
    parts = {
        "nixl_wrapper": Agent(), "transfer_topo": topology, "use_mla": False, "dcp_size": 1, "num_regions": 1,
        "_physical_blocks_per_logical_kv_block": 1, "_bidirectional_kv_xfer_enabled": False, "_mixed_mem_types": False,
        "tp_mappings": {
            "engine": SimpleNamespace(all_source_ranks=(0,), source_ranks_per_group=[{0}], local_consumers=1)
        },
        "region_group_ids": [0], "dst_region_group_ids": {"engine": [0]}, "src_xfer_handles_by_block_size": {16: 1},
        "dst_xfer_side_handles": {"engine": {0: 2}}, "dst_num_blocks": {"engine": 99, None: 99}, "engine_id": None,
        "dst_region_num_blocks": {}, "dst_uses_region_group_mapping": {"engine": False},
        "_uses_region_group_mapping": False, "_has_mamba": False,
        "kv_cache_config": SimpleNamespace(transfer_groups=["attention"]),
        "_invalid_remote_engines": set(), "_remote_agents": {"engine": {(0, 0): "agent"}}, "_engine_last_active": {},
        "_recving_metadata": {}, "_recving_transfers": {}, "_pending_recv_notifs": {}, "_recv_failures": set(),
        "_compute_desc_ids": lambda block_ids, **_: [each for group in block_ids for each in group],
    }  # fmt: skip
    vars(worker).update(parts)
    pull = ReqMeta(([7, 8],), ([7, 8],), 1, remote=RemoteMeta(([3, 4],), "host", 1, "engine", "its"), awaiting_kvs=True)
    worker._recving_metadata["r"] = pull
    return worker, SimpleNamespace(connector_worker=worker), pull


def test_a_pull_that_was_given_up_during_its_handshake_reads_nothing_and_ends_its_lease() -> None:
    worker, _, pull = shaking_hands()
    worker._read_blocks_for_req("r", pull)
    assert worker.nixl_wrapper.read == [([7, 8], [3, 4])], "the control"
    assert worker._recving_transfers == {"r": [1]}

    worker, connector, pull = shaking_hands()
    assert vllm_private.give_up_pull(connector, "r") == []
    worker._read_blocks_for_req("r", pull)
    assert (worker.nixl_wrapper.read, worker._recving_transfers) == ([], {})
    assert worker.nixl_wrapper.told == [("agent", b"its:1")]


@pytest.mark.parametrize(
    ("is_running", "computed", "in_flight"), [(True, 81, 81), (True, 79, 0), (False, 80, 0)], ids=str
)
def test_kv_that_is_not_computed_yet_is_not_handed_over(
    monkeypatch: pytest.MonkeyPatch, is_running: bool, computed: int, in_flight: int
) -> None:
    """A request that was preempted computes again in a step that is under way: vLLM counts it as computed."""
    from vllm.v1.request import RequestStatus

    monkeypatch.setattr(vllm_private, "allows", lambda layout, feature: True)
    monkeypatch.setattr(vllm_private, "layout_of", lambda *configs: None)
    request = SimpleNamespace(
        status=RequestStatus.RUNNING,
        num_tokens=81,
        num_output_tokens=5,
        num_computed_tokens=computed,
        num_in_flight_tokens=in_flight,
    )
    connector = SimpleNamespace(connector_scheduler=SimpleNamespace(use_host_buffer=False))
    scheduler = SimpleNamespace(
        requests={"r": request},
        running=[request] if is_running else [],
        get_kv_connector=lambda: connector,
        vllm_config=None,
        kv_cache_config=None,
    )
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))
    assert vllm_private.hand_over(engine, "r", {}) is None
    assert request.num_computed_tokens == computed


def test_private_methods_exist_where_subclasses_override_them() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    kinds: tuple[Any, ...] = (BlockPool, CPUModelRunner, GPUModelRunner, Scheduler)
    classes = {kind.__name__: kind for kind in kinds}
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


def test_no_private_method_is_overridden_that_the_list_leaves_out() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from decode_worker.engine_scheduler import DecodeScheduler
    from kv_transfer.claims.block_events import EventfulBlockPool
    from kv_transfer.engine_connector import RachisNixlConnector
    from prefill_worker.engine_scheduler import AsyncStreamingScheduler, StreamingScheduler
    from prefill_worker.streaming_request import StreamingRequest
    from shared_worker.engine_scheduler import SharedScheduler
    from tests.pure.kv_transfer.test_vllm_private import named

    overridden: dict[str, set[str]] = {}
    for kind in (
        AsyncStreamingScheduler,
        DecodeScheduler,
        EventfulBlockPool,
        RachisNixlConnector,
        SharedScheduler,
        StreamingRequest,
        StreamingScheduler,
        device_pool.TieredBlockPool,
        type("Runner", (model_runners.SeededChunkedPrefill, model_runners.SharedPrefixOrder, CPUModelRunner), {}),
    ):
        theirs = {name for each in kind.__mro__ if each.__module__.startswith("vllm.") for name in vars(each)}
        for each in kind.__mro__:
            private = {name for name in vars(each) if name.startswith("_") and not name.startswith("__")}
            if not each.__module__.startswith("vllm.") and private & theirs - {"_abc_impl"}:
                overridden.setdefault(each.__module__, set()).update(private & theirs - {"_abc_impl"})
    assert overridden == named()


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


def test_blocks_that_transfers_alone_hold_are_counted_once_each() -> None:
    blocks = [SimpleNamespace(block_id=number, ref_cnt=count) for number, count in enumerate((0, 1, 2, 2, 1, 2, 2))]
    # The second is held by a copy alone, the third by two of them, the fourth by a copy and a request.
    held = [blocks[1], blocks[2], blocks[2], blocks[3]]
    # The fifth by an overdue pull, the sixth by one and a request, the last by one and a copy.
    overdue = [blocks[4], blocks[5], blocks[6]]
    scheduler = SimpleNamespace(
        connector=SimpleNamespace(
            host_tier=SimpleNamespace(held_blocks=lambda: [*held, blocks[6]]),
            quarantine=SimpleNamespace(blocks=overdue),
        ),
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(blocks=blocks)),
    )
    assert vllm_private.blocks_held_by_transfers(scheduler) == 4
    scheduler.connector.host_tier = None
    assert vllm_private.blocks_held_by_transfers(scheduler) == 1
    scheduler.connector.quarantine = None
    assert vllm_private.blocks_held_by_transfers(scheduler) == 0


def test_a_hand_over_says_that_workers_do_not_know_its_lease_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass over notices of it until the next step tells them: `between_steps` asks them nothing meanwhile."""
    from vllm.v1.request import RequestStatus

    # Every layout can be handed over here.
    monkeypatch.setattr(vllm_private, "layout_of", lambda *of: None)
    # As above.
    monkeypatch.setattr(vllm_private, "allows", lambda *of: True)
    request = SimpleNamespace(
        status=RequestStatus.RUNNING, num_tokens=9, num_output_tokens=2, num_computed_tokens=8, num_in_flight_tokens=0
    )
    told: set[str] = set()
    sides = SimpleNamespace(use_host_buffer=False, _reqs_in_batch=told)
    connector = SimpleNamespace(connector_scheduler=sides, has_untold_leases=False)
    scheduler = SimpleNamespace(
        requests={"r": request}, running=[request], vllm_config=None, kv_cache_config=None,
        get_kv_connector=lambda: connector, _free_request=lambda request: ({"lease": 1}, None),
    )  # fmt: skip
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    engine: Any = SimpleNamespace(engine_core=core, abort_request=lambda names, internal: None)

    assert vllm_private.hand_over(engine, "r", {"do_remote_decode": True}) == {"lease": 1}

    assert (told, connector.has_untold_leases) == ({"r"}, True)
