"""A connector that loads the beginning of some prompts from elsewhere, a few engine steps late; some loads fail.

What is prefilled for another engine is leased: its blocks are read from there a few steps later, and then free.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.request import RequestStatus

from kv_transfer import vllm_private
from kv_transfer.tiers.host_tiering import HostTiering


@dataclass(frozen=True, slots=True)
class SlowLoad:
    """KV of these tokens, from token `start` on, that will be written into the request's blocks.

    landing_tokens: of a load that fails, so many from `start` on arrive, the rest of the blocks holds rubbish. None: it
    does not fail.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    landing_tokens: int | None = None
    # What the KV of its first token follows.
    root: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """KV of these tokens that another engine will read in these blocks."""

    request_id: str
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    # What the KV of its first token follows.
    root: int = 0


class NoTransfer(KVConnectorBase_V1):
    """A connector that transfers nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return


class SlowLoadConnector(HostTiering, NoTransfer):
    """remote_tokens: for each request, how much of its prompt can be loaded once.

    failing: of which of them how many tokens land before the load fails. undecided: of which request the connector
    cannot tell, so many times that it is asked, what it could load; once more after a load that fails.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._remote: set[str] = set()
        self.remote_tokens: dict[str, int] = {}
        self.failing: dict[str, int] = {}
        self.undecided: Counter[str] = Counter()
        self._loads: list[SlowLoad] = []
        self._leases: list[Lease] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.undecided[request.request_id]:
            self.undecided[request.request_id] -= 1
            return None, False
        remote = min(self.remote_tokens.get(request.request_id, 0), request.num_tokens)
        self._remote.discard(request.request_id)
        # The runner's side has no ledger, and calls nothing of this.
        assert self.swaps is not None
        if self.swaps.tokens(request.request_id) or remote <= num_computed_tokens:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._remote.add(request.request_id)
        return remote - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.kv_transfer_params:
            # As NIXL's: a pull begins once, if there is anything to be pulled.
            request.kv_transfer_params["do_remote_prefill"] = False
        if num_external_tokens and request.request_id in self._remote:
            self._remote.remove(request.request_id)
            end = min(self.remote_tokens.pop(request.request_id), request.num_tokens)
            (device_blocks,) = blocks.get_block_ids()
            tokens = tuple(vllm_private.token_ids(request)[:end])
            landing = self.failing.pop(request.request_id, None)
            if landing is not None:
                self.undecided[request.request_id] += 1
            start = end - num_external_tokens
            root = _root(request)
            self._loads.append(SlowLoad(request.request_id, tokens, start, tuple(device_blocks), landing, root))
            num_external_tokens = 0
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        kept, params = super().request_finished(request, block_ids)
        is_handed_off = (request.kv_transfer_params or {}).get("do_remote_decode")
        if not is_handed_off or request.status is not RequestStatus.FINISHED_LENGTH_CAPPED:
            return kept, params
        tokens = tuple(request.all_token_ids[:-1])
        self._leases.append(Lease(request.request_id, tokens, tuple(block_ids), _root(request)))
        return True, params

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata: Any = super().build_connector_meta(scheduler_output)
        metadata.slow_loads, self._loads = self._loads, []
        metadata.leases, self._leases = self._leases, []
        return metadata


def _root(request: Any) -> int:
    return int(request.lora_request.lora_int_id) if request.lora_request is not None else 0
