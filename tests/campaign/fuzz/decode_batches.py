"""Random requests that share prefixes through the real decode schedulers, on a model runner that checks the KV.

`simulate` plays one seeded world: requests of several trees of prefixes, with priorities, deadlines and salts, some of
whose KV is pulled and lands late, or in part, or not at all, some cancelled wherever they are, in a pool so small that
some are preempted; some arrive with a part of their answer. Every answer is compared with that of a fresh request;
after every step blocks are counted, and the core of the scheduler has to know of every request what vLLM knows.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from vllm.v1.request import RequestStatus

from cluster_core.engine_jobs import TENANT_ARG
from decode_worker.batch_settings import BatchSettings
from decode_worker.batch_shares import SLACK_TOKENS
from decode_worker.chunk_hashes import ChunkHash
from decode_worker.stop_policies import POLICIES
from kv_transfer.handoff.emitted_output import EMITTED_ARG
from kv_transfer.tiers.tier_terms import TierCounters
from tests.campaign.fuzz.kv_checking_runner import adapter, expected_tokens
from tests.campaign.fuzz.session_moves import VOCABULARY
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, STEP_S, SimulatedEngine, SteppedClock
from tests.campaign.fuzz.tally import Tally, raised
from tests.campaign.fuzz.worlds import World, share_of, with_adapters, with_copies, with_tenants
from worker_runtime.vllm_conversion import REQUEST_DEADLINE_ARG

_MOST_TOKENS = 40
_SHARE_EMITTED = 0.4
# Salt and number of the adapter.
_Scope = tuple[str | None, int]


def drawn(rng: random.Random) -> World:
    settings = BatchSettings(
        policy=rng.choice(list(POLICIES)),
        chunk_tokens=rng.choice((1, BLOCK_SIZE, 2 * BLOCK_SIZE)),
        wait_bound_s=rng.choice((0.05, 0.3, 2.0)),
        guard=rng.random() < 0.5,
        probe_interval_s=0.5,
        probe_s=0.1,
        fallback_s=0.5,
        slack_tokens=rng.choice((0, 256, SLACK_TOKENS)),
    )
    world = World(
        v2=rng.random() < 0.5,
        depth=rng.choice((1, 2)),
        blocks=rng.choice((16, 30, 60, 120)),
        host_slots=rng.choice((0, 24)),
        places=rng.choice((2, 4, 8, 16)),
        token_budget=rng.choice((24, 96, 300)),
        sessions=0,
        requests=40,
        loads=rng.choice((0.0, 0.3, 1.0)),
        consumer=rng.random() < 0.7,
        decode=settings,
    )
    return with_copies(with_tenants(with_adapters(world, rng), rng), rng)


class _Simulation:
    def __init__(self, world: World, seed: int, clock: SteppedClock) -> None:
        self.world = world
        self.clock = clock
        self.random = random.Random(seed)
        self.engine = SimulatedEngine(world)
        self.engine.runner.step = self._in_time(self.engine.runner.step)  # type: ignore[assignment, method-assign]
        # As workers have it: what could not be loaded is computed.
        self.engine.scheduler.recompute_kv_load_failures = True
        self.tally = Tally()
        self.expected: dict[str, list[int]] = {}
        self.prefix_of: dict[ChunkHash, tuple[_Scope, tuple[int, ...]]] = {}
        self.failing: set[str] = set()
        self.unnoticed: set[str] = set()
        self.started = 0
        # Apart, so that a seed draws the same requests as ever.
        self.emitting = random.Random(f"emitted {seed}")
        self.adapting = random.Random(f"adapters {seed}")
        self.whose = random.Random(f"tenants {seed}")
        self.rate = self.random.choice((0.1, 0.4, 0.9))
        longest = min(10, (world.blocks - 1) // 2) * BLOCK_SIZE
        # Two levels of shared prefixes.
        self.prefixes = []
        for _ in range(self.random.randint(1, 4)):
            first = self.text(self.random.randrange(longest))
            self.prefixes += [first + self.text(self.random.randrange(3 * BLOCK_SIZE)) for _ in range(2)]
        self.longest = (world.blocks - 1) * BLOCK_SIZE - _MOST_TOKENS

    def text(self, tokens: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(tokens)]

    def _in_time(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A step takes its time, so that there is something to learn from."""

        def take(output: Any) -> Any:
            self.clock.advance(STEP_S * self.random.uniform(0.5, 1.5))
            return step(output)

        return take

    def run(self) -> Tally:
        for _ in range(300 * self.world.requests):
            self._arrive()
            self._cancel()
            self.clock.advance(STEP_S)
            if not self.engine.turn() and self.started == self.world.requests:
                break
            self.engine.check_invariants()
            self.check_books()
            self.tally.recomputes += sum(len(output.preempted_req_ids or ()) for output in self.engine.outputs)
            self.engine.outputs.clear()
        else:
            raise AssertionError(f"stuck: {sorted(self.engine.scheduler.requests)}")
        for name, tokens in self.expected.items():
            if self.engine.answers.get(name) != tokens:
                self.tally.wrong.append(f"{name}: {self.engine.answers.get(name)} instead of {tokens}")
        self.engine.check_idle()
        self.check_books()
        self._count()
        return self.tally

    def _count(self) -> None:
        tally, scheduler = self.tally, self.engine.scheduler
        tally.requests = len(self.expected)
        tally.failed_loads = self.engine.runner.failed_loads
        tally.count_tiers(TierCounters(), scheduler.tiers.counters)
        if scheduler.batching is not None:
            counters = scheduler.batching.counters
            for reason, number in counters.admissions.items():
                setattr(tally, f"joined_{reason.value}", number)

    def check_books(self) -> None:
        """Who waits, loads and runs is the same for vLLM and for the core of the scheduler."""
        scheduler = self.engine.scheduler
        batching = scheduler.batching
        if batching is None:
            return
        batching.tree.check_invariants()
        batching.shares.check_invariants()
        alive = {name: each for name, each in scheduler.requests.items() if not each.is_finished()}
        waiting = {member.request_id for member in batching.waiting()}
        # The batching core tells nobody the names in its batch.
        batch = set(batching._batch)
        assert waiting | batch == alive.keys(), "the core does not know who waits or runs, or knows who is gone"
        assert not waiting & batch
        queued = Counter(
            each.request_id for each in (*scheduler.waiting, *scheduler.kv_holding_waiting, *scheduler.running)
        )
        assert queued == Counter(list(alive)), (
            f"lost or there twice: {sorted((queued - Counter(list(alive))) + (Counter(list(alive)) - queued))}"
        )
        # A request that is put back after its load has failed, or whose adapter has no place when it has landed, is
        # noticed with the next step.
        unnoticed = {each.request_id for each in scheduler.waiting} - waiting - self.failing
        assert not unnoticed & self.unnoticed, f"{unnoticed} wait, and run for the core"
        assert not unnoticed or self.world.adapters, f"{unnoticed} wait, and run for the core"
        self.unnoticed = unnoticed
        for name in waiting:
            assert alive[name].status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{name} waits for the core"
        pulled = {name for name, each in alive.items() if each.status is RequestStatus.WAITING_FOR_REMOTE_KVS}
        assert pulled <= set(batching.loading()) <= batch, "the core does not know who loads"
        assert sum(batching.waiting_by_cause().values()) == len(waiting)
        assert batching.tree.waiting_requests == len(waiting)

    def check_hashes(self, name: str, prompt: list[int], scope: _Scope) -> None:
        """Two requests have the same hash exactly when they have the same prefix, salt and adapter."""
        batching, chunk_tokens = self.engine.scheduler.batching, getattr(self.engine.scheduler, "chunk_tokens", 0)
        if batching is None:
            return
        (member,) = (each for each in batching.waiting() if each.request_id == name)
        assert len(member.hashes) == len(prompt) // chunk_tokens
        for index, its in enumerate(member.hashes, 1):
            prefix = scope, tuple(prompt[: index * chunk_tokens])
            assert self.prefix_of.setdefault(its, prefix) == prefix, "one hash for two prefixes"

    def _arrive(self) -> None:
        rng = self.random
        if self.started == self.world.requests or rng.random() > self.rate:
            return
        name, max_tokens = str(self.started), rng.choice((1, 4, 12, _MOST_TOKENS))
        self.started += 1
        prefix = rng.choice(self.prefixes) if rng.random() < 0.8 else []
        prompt = (prefix + self.text(rng.randint(1, 2 * BLOCK_SIZE)))[: self.longest]
        self._draw_load(name, prompt)
        number = self.adapting.randrange(self.world.adapters + 1)
        answer = expected_tokens(prompt, max_tokens, number)
        emitted = answer[: self.emitting.randrange(max_tokens)] if self.emitting.random() < _SHARE_EMITTED else []
        if emitted:
            self.tally.emitted += 1
            if name in self.engine.remote_tokens and name not in self.failing and self.emitting.random() < 0.5:
                # The lease is on all of it, but for the last token.
                self.engine.remote_tokens[name] = len(prompt) + len(emitted) - 1
        self.expected[name] = answer[len(emitted) :]
        salt = rng.choice((None, None, None, "salt"))
        request = self.engine.request(
            name,
            prompt,
            max_tokens,
            priority=rng.choice((0, 0, 0, -1, 5)),
            cache_salt=salt,
            lora_request=adapter(number),
        )
        whose = self.whose.randrange(self.world.tenants + 1)
        arguments: dict[str, Any] = {TENANT_ARG: share_of(whose)} if whose else {}
        if emitted:
            arguments[EMITTED_ARG] = emitted
        if rng.random() < 0.2:
            arguments[REQUEST_DEADLINE_ARG] = self.clock.now_s + rng.random()
        request.sampling_params.extra_args = arguments or None
        self.engine.scheduler.add_request(request)
        self.check_hashes(name, prompt, (salt, number))

    def _draw_load(self, name: str, prompt: list[int]) -> None:
        rng, connector = self.random, self.engine.scheduler.connector
        if rng.random() < self.world.loads:
            self.tally.loads += 1
            connector.remote_tokens[name] = rng.randint(1, len(prompt))
            if rng.random() < 0.3:
                connector.failing[name] = rng.choice((0, rng.randrange(len(prompt))))
                self.failing.add(name)
        if rng.random() < 0.2:
            connector.undecided[name] = rng.randint(1, 5)

    def _cancel(self) -> None:
        """Of those that are left when nobody comes any more, none: whoever is lost would be cancelled at last."""
        everybody = self.started == self.world.requests
        if not everybody and self.random.random() < 0.02 and self.engine.scheduler.requests:
            name = self.random.choice(sorted(self.engine.scheduler.requests))
            if self.expected.pop(name, None) is not None:
                self.engine.abort(name)
                self.tally.cancelled += 1


def simulate(world: World, seed: int) -> Tally:
    """Raises AssertionError when blocks are lost or nothing moves; wrong answers are in the tally."""
    with SteppedClock() as clock:
        return _Simulation(world, seed, clock).run()


def play(seed: int, first: int = 0, **fixed: Any) -> Iterator[Tally]:
    """Worlds without end, from number `first` on: the tally of each, with what broke among its findings."""
    for number in count(first):
        world = replace(drawn(random.Random(f"decode {seed}/{number}")), **fixed)
        try:
            tally = simulate(world, number)
        except Exception as error:  # noqa: BLE001 - whatever breaks in a world is a finding
            tally = Tally(wrong=[raised(error)])
        tally.wrong = [f"world {number} of seed {seed}, {world}: {each}" for each in tally.wrong]
        yield tally
