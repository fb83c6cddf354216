"""A model runner without a model, which computes with the KV blocks it is told to use.

The KV of a position is a digest of the KV of the position before, read back through the block table, and of the token.
So a wrong block, a stale token, a block written by two requests or a missing copy gives a wrong digest from there on,
and at last a wrong token. It speaks both protocols of vLLM's model runners:

    V1   keeps the state of a request until it is finished; a preempted one is resumed through the cached requests
    V2   has a limited number of places; finished and preempted requests free theirs; who comes back comes as new

It carries out the copies of host swap; the loads of `slow_load` and copies in the background a few steps late; it reads
what is leased a few steps later. What fails leaves rubbish. A load that fails is reported as vLLM's own workers do: the
request, where nothing of it landed, or else the blocks in which there is rubbish.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kv_transfer.handoff.emitted_output import emitted_of
from kv_transfer.host_memory.copy_worker import BackgroundCopy, CopyReport
from kv_transfer.host_memory.swap_ledger import SwapCopies
from tests.campaign.fuzz.session_moves import VOCABULARY
from tests.campaign.fuzz.slow_load import Lease, SlowLoad

LOAD_STEPS = 3
# From the end of a prefill to the pull of its blocks, by the number of their tokens.
_LEASE_STEPS = (1, 12, 4)
# Of the copies in the background, by their numbers.
_BACKGROUND_STEPS = (0, 1, 5, 2)
_FAILS_EVERY = 9


def digest_of(before: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), before)


def adapter(number: int) -> LoRARequest | None:
    """vLLM's request for the adapter of that number; None for 0."""
    return LoRARequest(f"adapter {number}", number, f"/adapters/{number}") if number else None


def root_of(request: LoRARequest | None) -> int:
    """What the KV of a prompt begins with: that of an adapter is its own."""
    return request.lora_int_id if request is not None else 0


def expected_tokens(prompt: Sequence[int], count: int, root: int = 0) -> list[int]:
    """What a fresh request with this prompt generates."""
    digest, tokens = root, []
    for token in prompt:
        digest = digest_of(digest, token)
    for _ in range(count):
        tokens.append(digest % VOCABULARY)
        digest = digest_of(digest, tokens[-1])
    return tokens


@dataclass(slots=True)
class _State:
    """prompt_tokens: how many of the tokens are not the runner's own."""

    tokens: list[int]
    prompt_tokens: int
    blocks: list[int]
    computed: int
    root: int


class KvCheckingRunner:
    """`step` carries out one scheduler output. places: model-runner places, for V2. adapters: of one step at
    most. copy_s: what it says that a block of a copy in the background takes. failed_loads: how many have."""

    def __init__(
        self,
        *,
        v2: bool,
        blocks: int,
        block_size: int,
        places: int,
        host_slots: int,
        adapters: int = 0,
        copy_s: float = 0.0,
    ) -> None:
        self._v2 = v2
        self._adapters = adapters
        self._copy_s = copy_s
        self._block_size = block_size
        self._places = places
        self._kv = [[-1] * block_size for _ in range(blocks)]
        self._host = [[-1] * block_size for _ in range(host_slots)]
        self._states: dict[str, _State] = {}
        self._loads: list[tuple[int, SlowLoad]] = []
        self.failed_loads = 0
        self._invalid_blocks: set[int] = set()
        self._steps = 0
        self._background: list[tuple[int, BackgroundCopy]] = []
        self._leases: list[tuple[int, Lease]] = []
        # Leases that were read, and whether all was there.
        self.read_leases: dict[str, bool] = {}

    def step(self, output: Any) -> ModelRunnerOutput:
        self._steps += 1
        self._copy(output)
        self._begin_loads(output)
        sent = self._read_leases(output)
        loads: list[SlowLoad] = getattr(output.kv_connector_metadata, "slow_loads", [])
        self._loads += [(self._steps + LOAD_STEPS, load) for load in loads]
        landed = self._land(self._steps)
        failed, invalid_blocks = self._failures(landed)
        for each in output.kv_connector_metadata.rachis_background_copies:
            self._background.append((self._steps + _BACKGROUND_STEPS[each.number % len(_BACKGROUND_STEPS)], each))
        report = self._copy_in_background(self._steps)
        leaving = set(output.finished_req_ids)
        if self._v2:
            leaving |= set(output.preempted_req_ids or ())
        for request_id in leaving:
            self._states.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._begin(new)
        self._go_on(output.scheduled_cached_reqs)
        names = list(output.num_scheduled_tokens)
        adapters = {self._states[name].root for name in names} - {0}
        assert len(adapters) <= self._adapters, f"{len(adapters)} adapters in one step"
        for request_id in names:
            self._compute(self._states[request_id], output.num_scheduled_tokens[request_id])
        sampled = [self._sample(self._states[request_id]) for request_id in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                finished_sending=sent,
                finished_recving={load.request_id for load in landed},
                failed_recving=failed,
                invalid_block_ids=invalid_blocks,
                kv_connector_worker_meta=report,
            ),
        )

    def _copy(self, output: Any) -> None:
        self._carry_out(output.kv_connector_metadata.rachis_swap_copies)

    def _begin_loads(self, output: Any) -> None:
        """From now on anything may be written into their blocks, at any time."""
        for load in getattr(output.kv_connector_metadata, "slow_loads", []):
            for position in range(load.start, len(load.token_ids)):
                self._write(load.blocks, position, -1)

    def _carry_out(self, copies: SwapCopies) -> None:
        for block, slot in copies.out:
            self._host[slot] = list(self._kv[block])
        for block, slot in copies.back:
            self._kv[block] = list(self._host[slot])

    def _copy_in_background(self, step: int) -> CopyReport | None:
        """Carries out what is due, with what lies there by now. A copy that fails leaves rubbish where it wrote."""
        due = [copy for at, copy in self._background if at <= step]
        self._background = [(at, copy) for at, copy in self._background if at > step]
        report = CopyReport()
        for copy in due:
            report.ended[copy.number] += 1
            if copy.number % _FAILS_EVERY:
                self._carry_out(copy.copies)
                report.seconds["out"] += self._copy_s * len(copy.copies.out)  # type: ignore[assignment]
                report.seconds["back"] += self._copy_s * len(copy.copies.back)  # type: ignore[assignment]
            else:
                report.failed.add(copy.number)
                for _, slot in copy.copies.out:
                    self._host[slot] = [-1] * self._block_size
                for block, _ in copy.copies.back:
                    self._kv[block] = [-1] * self._block_size
        return report if due else None

    # The worker's side of a connector that is asked between two steps: what is due in the next one is there already.

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        landed = self._land(self._steps + 1)
        failed, self._invalid_blocks = self._failures(landed)
        return KVConnectorTransferResults(
            finished_sending=set(), finished_recving={load.request_id for load in landed}, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def build_connector_worker_meta(self) -> CopyReport | None:
        return self._copy_in_background(self._steps + 1)

    def get_kv_connector_stats(self) -> None:
        """There are none."""

    def _land(self, step: int) -> list[SlowLoad]:
        """Writes the loads that are due; returns them."""
        due = [load for at, load in self._loads if at <= step]
        self._loads = [(at, load) for at, load in self._loads if at > step]
        for load in due:
            digest = load.root
            lands_until = len(load.token_ids) if load.landing_tokens is None else load.start + load.landing_tokens
            for position, token in enumerate(load.token_ids):
                digest = digest_of(digest, token)
                if position >= load.start:
                    self._write(load.blocks, position, digest if position < lands_until else -1)
        return due

    def _read_leases(self, output: Any) -> set[str]:
        """Reads those that are due as another engine does; returns whose they are."""
        for lease in getattr(output.kv_connector_metadata, "leases", []):
            self._leases.append((self._steps + _LEASE_STEPS[len(lease.token_ids) % len(_LEASE_STEPS)], lease))
        due = [lease for at, lease in self._leases if at <= self._steps]
        self._leases = [(at, lease) for at, lease in self._leases if at > self._steps]
        for lease in due:
            digest, intact = lease.root, True
            for position, token in enumerate(lease.token_ids):
                digest = digest_of(digest, token)
                block, place = lease.blocks[position // self._block_size], position % self._block_size
                intact = intact and self._kv[block][place] == digest
            self.read_leases[lease.request_id] = intact
        return {lease.request_id for lease in due}

    def _failures(self, landed: Sequence[SlowLoad]) -> tuple[set[str], set[int]]:
        """(requests of which nothing landed, blocks of others in which there is rubbish)."""
        failed: set[str] = set()
        invalid_blocks: set[int] = set()
        for load in landed:
            if load.landing_tokens is None or load.start + load.landing_tokens >= len(load.token_ids):
                continue
            self.failed_loads += 1
            first = (load.start + load.landing_tokens) // self._block_size
            if first * self._block_size == load.start:
                failed.add(load.request_id)
            else:
                invalid_blocks.update(load.blocks[first : -(-len(load.token_ids) // self._block_size)])
        return failed, invalid_blocks

    def _begin(self, new: Any) -> None:
        if self._v2:
            assert new.req_id not in self._states, "V2: the request has a place already"
            assert len(self._states) < self._places, "V2: no free place"
        # What has been emitted before vLLM tells a V2 runner by itself, and ours a V1 runner.
        emitted = [] if self._v2 else emitted_of(new.sampling_params)
        tokens = new.prefill_token_ids if self._v2 else new.prompt_token_ids
        blocks = list(new.block_ids[0])
        self._states[new.req_id] = _State(
            [*tokens, *emitted], len(tokens), blocks, new.num_computed_tokens, root_of(new.lora_request)
        )

    def _go_on(self, cached: Any) -> None:
        rows = zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        )
        for request_id, new_blocks, computed, output_tokens in rows:
            state = self._states[request_id]
            if not self._v2:
                # What was sampled and then dropped: its request was preempted meanwhile.
                del state.tokens[state.prompt_tokens + output_tokens :]
            if request_id in cached.resumed_req_ids:
                assert not self._v2, "V2: nothing is resumed"
                state.blocks = list(new_blocks[0])
                known = cached.all_token_ids.get(request_id)
                if known is not None:
                    state.tokens = [*known, *state.tokens[len(known) :]]
            else:
                if new_blocks is not None:
                    state.blocks += new_blocks[0]
                if self._v2:
                    assert state.computed == computed, "V2: the computed count went back without a new request"
            state.computed = computed

    def _compute(self, state: _State, count: int) -> None:
        for position in range(state.computed, state.computed + count):
            before = self._at(state, position - 1) if position else state.root
            self._write(state.blocks, position, digest_of(before, state.tokens[position]))
        state.computed += count

    def _sample(self, state: _State) -> list[int]:
        if state.computed < len(state.tokens):
            return []
        token = self._at(state, state.computed - 1) % VOCABULARY
        state.tokens.append(token)
        return [token]

    def _write(self, blocks: Sequence[int], position: int, digest: int) -> None:
        self._kv[blocks[position // self._block_size]][position % self._block_size] = digest

    def _at(self, state: _State, position: int) -> int:
        return self._kv[state.blocks[position // self._block_size]][position % self._block_size] & 0xFFFFFFFF
