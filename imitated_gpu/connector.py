"""The worker's KV connector over an imitated GPU: what is pulled and copied takes its modelled time, and moves nothing.

The scheduler's side is the real one. Of the worker's side only what touches memory is replaced: NIXL's agent
(`nixl_agent`), and the copies between device and host memory. Blocks have no content, so none is compared.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from cluster_core.clock import monotonic_s
from cluster_sim.engines.vllm_copies import Copies
from imitated_gpu.link import SharedLink
from imitated_gpu.nixl_agent import ImitatedNixlAgent
from imitated_gpu.settings import ImitationSettings
from kv_transfer.engine_connector import RachisNixlConnector
from kv_transfer.host_memory.copy_worker import BackgroundCopy, CopyReport
from kv_transfer.host_memory.swap_ledger import SwapCopies

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig


class HostLink:
    """Host memory of an imitated GPU, and who copies: `host_pool.HostPool` and `copy_worker.CopyWorker` in one."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._waited_s = 0.0

    def carry_out(self, copies: SwapCopies) -> None:
        self._waited_s += self._copies.waited_s(copies)

    def begin(self, copies: Sequence[BackgroundCopy]) -> None:
        self._copies.begin_background(copies, monotonic_s())

    def report(self) -> CopyReport | None:
        return self._copies.ended(monotonic_s())

    def take_waited_s(self) -> float:
        """Seconds of copies that the next step waits for, since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def close(self) -> None:
        """There is no thread."""


class ImitatedNixlConnector(RachisNixlConnector):
    """See the module."""

    def __init__(self, vllm_config: "VllmConfig", role: "KVConnectorRole", kv_cache_config: "KVCacheConfig") -> None:
        settings = ImitationSettings.of(vllm_config)
        costs = settings.costs
        link = SharedLink(costs.network_bytes_per_s, costs.network_latency_s)
        with _in_place_of_nixl(link, settings):
            super().__init__(vllm_config, role, kv_cache_config)
        # Worker side.
        self.host_link = HostLink(Copies(costs, vllm_config.cache_config.block_size))

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        # Past the mixins: theirs is real host memory, and real checksums.
        NixlPullConnector.register_kv_caches(self, kv_caches)
        if self._host_slots:
            stand_in: Any = self.host_link
            self._host_pool = stand_in
            self._copy_worker = stand_in

    def shutdown(self) -> None:
        super().shutdown()
        if self.connector_worker is not None:
            self.connector_worker.nixl_wrapper.close()


@contextmanager
def _in_place_of_nixl(link: SharedLink, settings: ImitationSettings) -> Iterator[None]:
    """Connectors that are made in the block have imitated agents."""
    assert hasattr(base_worker, "NixlWrapper"), "vLLM has another name for it"
    real = base_worker.NixlWrapper
    base_worker.NixlWrapper = partial(ImitatedNixlAgent, link=link, host=settings.host, ports=settings.ports)
    try:
        yield
    finally:
        base_worker.NixlWrapper = real
