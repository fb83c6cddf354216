"""Random sessions through the real schedulers, on a model runner that checks the KV it computes with.

`simulate` plays one seeded world: sessions that append, update, finish and are cancelled, plain requests beside them, a
pool so small that somebody is always preempted, host memory for some of what is. Every answer is compared with that of
a fresh request with the final prompt; blocks and host slots are counted throughout.
"""

import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cluster_core.engine import SessionMode
from prefill_worker import scheduler_settings
from prefill_worker.engine_scheduler import AsyncStreamingScheduler, StreamingScheduler
from tests.fuzz.kv_checking_runner import VOCABULARY, KvCheckingRunner, expected_tokens

BLOCK_SIZE = 16
_HASH = get_hash_fn_by_name("sha256_cbor")
POLICIES = ("default_vllm", "fcfs", "mcps", "lcas")


@dataclass(frozen=True, slots=True)
class World:
    """One setting of the simulation. depth: engine steps in flight; above 1 the asynchronous scheduler."""

    v2: bool = False
    depth: int = 1
    policy: str = "fcfs"
    preemption: str = "swap"
    blocks: int = 30
    host_slots: int = 24
    places: int = 6
    token_budget: int = 96
    sessions: int = 30
    requests: int = 6


@dataclass(slots=True)
class Tally:
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    cancelled: int = 0
    appends: int = 0
    updates: int = 0
    swaps: int = 0
    recomputes: int = 0
    invalidated_tokens: int = 0
    swapped_blocks: int = 0

    def add(self, other: "Tally") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def make_scheduler(kind: type, world: World, *, model_len: int = 4096) -> tuple[Any, Callable[..., Any]]:
    """(scheduler without a model, its block hasher)."""
    asynchronous = world.depth > 1
    scheduling = SchedulerConfig(
        max_num_seqs=world.places,
        max_num_batched_tokens=world.token_budget,
        max_model_len=model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=asynchronous,
    )
    config = VllmConfig(
        model_config=ModelConfig(model=str(resources.files("builtin_model") / "weights"), max_model_len=model_len),
        scheduler_config=scheduling,
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="HostSwapConnector",
            kv_connector_module_path="kv_transfer.host_swap",
            kv_role="kv_both",
            kv_connector_extra_config={"rachis_host_swap_bytes": world.host_slots},
        ),
        additional_config={
            scheduler_settings.KEY: {
                "policy": world.policy,
                "preemption": world.preemption,
                "starvation_s": 0.02,
                "cost_profile": None,
            }
        },
    )
    # The CPU platform switches asynchronous scheduling off and sets its own block size.
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = world.blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=world.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )
    scheduler.use_v2_model_runner = world.v2
    init_none_hash(_HASH)
    return scheduler, get_request_block_hasher(BLOCK_SIZE, _HASH)


def make_request(name: str, prompt: list[int], max_tokens: int, hasher: Callable[..., Any]) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(
        request_id=name, prompt_token_ids=list(prompt), sampling_params=params, pooling_params=None, block_hasher=hasher
    )


class _Simulation:
    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        kind = AsyncStreamingScheduler if world.depth > 1 else StreamingScheduler
        self.scheduler, self.hasher = make_scheduler(kind, world)
        self.runner = KvCheckingRunner(
            v2=world.v2,
            blocks=world.blocks,
            block_size=BLOCK_SIZE,
            places=world.places,
            host_slots=world.host_slots,
        )
        self.tally = Tally()
        self.open: dict[str, tuple[SessionMode, list[int], int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.started = 0
        self.bases = [self._tokens(300) for _ in range(3)]

    def run(self) -> Tally:
        world = self.world
        for _ in range(400 * (world.sessions + world.requests)):
            self._arrive()
            for name in list(self.open):
                self._input(name)
            if not self._step() and self.started == world.sessions + world.requests and not self.open:
                break
            self._check_conservation()
        else:
            raise AssertionError(f"stuck: {sorted(self.expected.keys() - self._done())}")
        self._compare()
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == world.blocks - 1
        assert self.scheduler.swaps.free_slots == world.host_slots
        assert not self.scheduler.requests
        assert not self.scheduler._sessions
        assert self.scheduler.num_waiting_for_streaming_input == 0
        self.tally.swapped_blocks = self.scheduler.swaps.counters.blocks_out
        return self.tally

    def _arrive(self) -> None:
        world, rng = self.world, self.random
        if self.started == world.sessions + world.requests or rng.random() > 0.25:
            return
        name, max_tokens = str(self.started), rng.choice((1, 1, 1, 2, 6))
        self.started += 1
        if rng.random() * (world.sessions + world.requests) < world.requests:
            prompt = self._prompt() or [1]
            self.expected[name] = expected_tokens(prompt, max_tokens)
            self.scheduler.add_request(make_request(name, prompt, max_tokens, self.hasher))
            return
        prompt = self._prompt() if rng.random() < 0.9 else self._tokens(rng.randrange(2))
        mode = rng.choice(list(SessionMode))
        self.open[name] = (mode, prompt, max_tokens)
        self.scheduler.open_session(make_request(name, prompt, max_tokens, self.hasher), mode)

    def _input(self, name: str) -> None:
        rng = self.random
        mode, prompt, max_tokens = self.open[name]
        chance = rng.random()
        if chance < 0.06:
            piece = self._tokens(rng.choice((0, 1, 1, 5, 40, 90)))
            if len(prompt) + len(piece) <= self._longest():
                self.open[name] = (mode, prompt + piece, max_tokens)
                self.scheduler.extend_prompt(name, piece)
                self.tally.appends += 1
        elif chance < 0.12 and mode is SessionMode.UPDATE:
            self._update(name)
        elif chance < 0.15:
            closing = self._tokens(rng.choice((0, 0, 1, 20)))
            if prompt + closing:
                del self.open[name]
                self.expected[name] = expected_tokens(prompt + closing, max_tokens)
                self.scheduler.close_input(name, closing)
        elif chance < 0.155:
            del self.open[name]
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.tally.cancelled += 1

    def _update(self, name: str) -> None:
        rng = self.random
        mode, prompt, max_tokens = self.open[name]
        kept = rng.randrange(len(prompt) + 1) if rng.random() < 0.8 else len(prompt)
        changed = prompt[:kept] + self._tokens(rng.choice((0, 0, 1, 30, 90)))
        if len(changed) > self._longest():
            return
        self.open[name] = (mode, changed, max_tokens)
        self.scheduler.replace_prompt(name, changed)
        self.tally.updates += 1

    def _step(self) -> bool:
        """One turn of the engine. False: nothing was left to do."""
        if self.scheduler.has_requests() and len(self.in_flight) < self.world.depth:
            output = self.scheduler.schedule()
            self.in_flight.append((output, self.runner.step(output)))
            if len(self.in_flight) < self.world.depth and output.total_num_scheduled_tokens:
                return True
        if not self.in_flight:
            return bool(self.scheduler.has_requests())
        output, ran = self.in_flight.popleft()
        books = {name: self.scheduler._sessions[name] for name in self.scheduler._sessions}
        for outputs in self.scheduler.update_from_output(output, ran).values():
            for each in outputs.outputs:
                self.answers.setdefault(each.request_id, []).extend(each.new_token_ids)
        for name in books.keys() - self.scheduler._sessions.keys():
            record = self.scheduler.take_session_record(name)
            self.tally.swaps += record.preemptions_swap
            self.tally.recomputes += record.preemptions_recompute
            self.tally.invalidated_tokens += record.tokens.invalidated_tokens
        return True

    def _check_conservation(self) -> None:
        scheduler = self.scheduler
        scheduler.swaps.check_invariants()
        (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        held = [block for blocks in manager.req_to_blocks.values() for block in blocks]
        deferred = [block for _, blocks in scheduler.deferred_frees for block in blocks]
        for block in {id(each): each for each in held + deferred}.values():
            owners = sum(each is block for each in held) + sum(each is block for each in deferred)
            assert block.ref_cnt == owners, f"block {block.block_id}: {block.ref_cnt} references, {owners} owners"
        unique = len({each.block_id for each in held + deferred})
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free + unique == self.world.blocks - 1, f"{free} free and {unique} held blocks"

    def _compare(self) -> None:
        for name, tokens in self.expected.items():
            self.tally.checked += 1
            if self.answers.get(name) != tokens:
                self.tally.wrong.append(f"{name}: {self.answers.get(name)} instead of {tokens}")

    def _done(self) -> set[str]:
        return {name for name, tokens in self.expected.items() if len(self.answers.get(name, ())) == len(tokens)}

    def _prompt(self) -> list[int]:
        base = self.random.choice(self.bases)
        return base[: self.random.randrange(len(base))] + self._tokens(self.random.randrange(1, 60))

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def _longest(self) -> int:
        return (self.world.blocks - 1) * BLOCK_SIZE - 8


def simulate(world: World, seed: int) -> Tally:
    """Raises AssertionError when blocks are lost or nothing moves; wrong answers are in the tally."""
    return _Simulation(world, seed).run()
