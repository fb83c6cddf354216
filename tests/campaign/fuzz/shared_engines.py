"""Random sessions, prompts for others, pulled and whole requests through one scheduler that does it all.

The worlds of `simulated`, with decode batches of every policy, a chunk bound, and plain requests of four kinds: whole
ones, prompts whose blocks are leased and read elsewhere, requests whose KV is pulled, and answers that go on from what
another engine has emitted. Besides what is asked there:
    the bound       beside decodes no step computes more of prompts than their objective allows, unless it says why;
                    for a first token that would be late no more than decodes have to spare
    pulled first    what has landed is computed in the next step that has a place for it, before prompts of its priority
    leases          whoever pulls finds the KV of the prompt, however late
    the batch       the core knows of those that decode here, and of nobody else, what vLLM knows
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from vllm.v1.request import RequestStatus

from cluster_core.engine_reports import EngineCosts
from decode_worker.batch_settings import BatchSettings
from decode_worker.batch_shares import SLACK_TOKENS
from decode_worker.step_bound import ALPHA, Limit, spare_s
from decode_worker.stop_policies import POLICIES
from kv_transfer.handoff.emitted_output import EMITTED_ARG
from kv_transfer.limited_request import last_step_runs
from prefill_worker.policies import BOUND_PARTIAL
from prefill_worker.policies import POLICIES as ORDERS
from prefill_worker.streaming_request import LOADING
from tests.campaign.fuzz.kv_checking_runner import expected_tokens, root_of
from tests.campaign.fuzz.simulated import Simulation
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SteppedClock
from tests.campaign.fuzz.tally import Tally, raised
from tests.campaign.fuzz.worlds import World, with_adapters, with_copies, with_tenants

# 10 ms for a step, and 1 ms for each token of a prompt.
COSTS = EngineCosts(decode_step_s=0.010, prefill_s_per_token=0.001)
# Of answers: long enough that prompts come meanwhile.
_ANSWERS = (1, 4, 12, 40)
_YIELDS = (Limit.TTFT, Limit.MEMORY)
# Steps that compute prompts, in which what has landed may go without: those that were under way.
_MOST_STEPS_LANDED = 3


def drawn(rng: random.Random) -> World:
    world = World(
        v2=rng.random() < 0.5,
        depth=rng.choice((1, 2)),
        policy=rng.choice(list(ORDERS)),
        preemption=rng.choice(("recompute", "swap", "swap", "cost")),
        starvation_s=rng.choice((0.02, 0.2, 2.0)),
        blocks=rng.choice((24, 30, 60, 120)),
        host_slots=rng.choice((0, 24, 80)),
        places=rng.choice((4, 6, 12)),
        token_budget=rng.choice((24, 96, 200)),
        sessions=rng.choice((0, 8, 15)),
        requests=30,
        loads=rng.choice((0.0, 0.3, 0.6)),
        eviction=rng.choice(("rachis", "rachis", "hotprefix", "lru")),
        admission=rng.choice(("none", "everything", "selective")),
        frequency_threshold=rng.choice((1, 2)),
        decode=BatchSettings(
            policy=rng.choice(list(POLICIES)),
            chunk_tokens=rng.choice((BLOCK_SIZE, 2 * BLOCK_SIZE)),
            wait_bound_s=rng.choice((0.05, 0.3)),
            guard=rng.random() < 0.5,
            probe_interval_s=0.5,
            probe_s=0.1,
            fallback_s=0.5,
            slack_tokens=rng.choice((0, 256, SLACK_TOKENS)),
        ),
        is_shared=True,
        tpot_s=rng.choice((0.0, 0.02, 0.05)),
        ttft_s=rng.choice((0.5, 5.0)),
    )
    world = replace(world, is_measured=world.policy in BOUND_PARTIAL, has_priorities=world.places == 12)
    world = with_adapters(world, rng) if rng.random() < 0.3 else world
    best_effort_tpot_s = rng.choice((None, 0.0, 4 * world.tpot_s))
    world = with_copies(with_tenants(world, rng), rng)
    return replace(world, best_effort_tpot_s=best_effort_tpot_s) if world.has_priorities else world


class SharedSimulation(Simulation):
    """See the module."""

    def __init__(self, world: World, seed: int, clock: SteppedClock) -> None:
        super().__init__(world, seed, clock)
        scheduler = self.engine.scheduler
        scheduler.use_costs(lambda: COSTS)
        scheduler.recompute_kv_load_failures = True
        self.schedule, scheduler.schedule = scheduler.schedule, self._checked_schedule
        # Of pulled requests that have landed: the steps without them.
        self.passed_over: dict[str, int] = {}
        self.pulled: set[str] = set()
        self.unnoticed: set[str] = set()
        # Of those that answer: tokens that their clients had when they were first seen to, and when that was.
        self.answering: dict[str, tuple[int, float]] = {}
        # What the step that was planned last takes.
        self.last_step_s = 0.0

    def _draw_load(self, name: str, prompt: list[int], *, is_plain: bool) -> None:
        if not is_plain:
            return
        rng, connector = self.random, self.engine.scheduler.connector
        connector.remote_tokens[name] = len(prompt) if rng.random() < 0.7 else rng.randrange(1, len(prompt) + 1)
        self.pulled.add(name)
        self.tally.loads += 1
        if rng.random() < 0.2:
            connector.failing[name] = rng.choice((0, rng.randrange(len(prompt))))
        if rng.random() < 0.2:
            connector.undecided[name] = rng.randint(1, 5)

    def _add(self, name: str, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        rng, root = self.random, root_of(fields["lora_request"])
        transfer = None
        if name in self.pulled:
            transfer = {"do_remote_prefill": True}
        elif rng.random() < 0.3:
            max_tokens, transfer = 1, {"do_remote_decode": True}
            self.tally.leases += 1
        if max_tokens > 1:
            # What is longer than memory no engine takes.
            room = (self.world.blocks - 1) * BLOCK_SIZE - len(prompt)
            max_tokens = min(rng.choice(_ANSWERS), max(1, room))
        answer = expected_tokens(prompt, max_tokens, root)
        emitted = answer[: rng.randrange(1, max_tokens)] if name in self.pulled and max_tokens > 1 else []
        self.expected[name] = answer[len(emitted) :]
        request = self.engine.request(name, prompt, max_tokens, transfer, **fields)
        if emitted:
            request.sampling_params.extra_args = {**(request.sampling_params.extra_args or {}), EMITTED_ARG: emitted}
        self.tally.emitted += bool(emitted)
        self.engine.scheduler.add_request(request)
        if emitted:
            self.answering[name] = len(emitted), self.clock.now_s

    # What every step has to keep.

    def _checked_schedule(self) -> Any:
        scheduler = self.engine.scheduler
        before = dict(scheduler.chunks)
        # One that was preempted computes again what it had: a prompt to the others.
        needing_one = [each for each in scheduler.running if _left_tokens(each) <= 1 and not last_step_runs(each)]
        decoding = {each.request_id for each in needing_one if each.num_output_tokens + each.num_output_placeholders}
        holding = {each.request_id for each in needing_one} | {
            each.request_id for each in scheduler.kv_holding_waiting if _left_tokens(each) <= 1
        }
        landed = self._with_room(self._landed())
        spare = self._spare_s()
        output = self.schedule()
        computed = output.num_scheduled_tokens
        prompt_tokens = sum(tokens for tokens in computed.values() if tokens > 1)
        self.last_step_s = COSTS.decode_step_s + prompt_tokens * COSTS.prefill_s_per_token
        by_memory, by_first_token = (
            scheduler.chunks[each] > before.get(each, 0) for each in (Limit.MEMORY, Limit.TTFT)
        )
        # Of those that wait for this step: not of who has the last token with the one before, or waits for a load.
        tpot_s = min(filter(None, (self._tpot_s(name) for name in holding & computed.keys())), default=0.0)
        if tpot_s and not by_memory and any(computed.get(name) == 1 for name in decoding):
            left_out = len(holding - computed.keys())
            self._check_bound(tpot_s, prompt_tokens, left_out, spare if by_first_token else 0.0)
        # Where blocks are short for decodes as well, leases hold them. Where there are some, lower priorities go first.
        priority_of = {name: scheduler.requests[name].priority for name in (*landed, *computed)}
        last = max((priority_of[name] for name, tokens in computed.items() if tokens > 1), default=None)
        for name in landed if last is not None else ():
            passed_over = name not in computed and priority_of[name] <= last
            self.passed_over[name] = self.passed_over.get(name, 0) + 1 if passed_over else 0
            assert self.passed_over[name] <= _MOST_STEPS_LANDED, f"{name} has landed and waits behind prompts"
        return output

    def _spare_s(self) -> float:
        """What those that decode have to spare, before the step; the one before may still run."""
        scheduler, now_s = self.engine.scheduler, self.clock.now_s
        decoding = [each for each in scheduler.running if _left_tokens(each) <= 1 and not last_step_runs(each)]
        spare: dict[bool, list[float]] = {False: [], True: []}
        for request in (*decoding, *(scheduler.requests[name] for name in self._landed())):
            had, since_s = self.answering.get(request.request_id, (request.num_output_tokens, now_s))
            tpot_s, runs = self._tpot_s(request.request_id), bool(request.num_output_placeholders)
            took_s = now_s - since_s + runs * self.last_step_s
            if request.num_output_tokens:
                self.answering.setdefault(request.request_id, (had, since_s))
                its = spare[request.priority > 0]
                its += [(request.num_output_tokens - had + runs) * tpot_s - took_s] if tpot_s else []
            elif runs and tpot_s:
                spare[request.priority > 0].append(0.0)
        return min(map(spare_s, spare.values()))

    def _tpot_s(self, name: str) -> float:
        """0: nobody promises it one."""
        best_effort_s = self.world.best_effort_tpot_s
        if best_effort_s is None or self.engine.scheduler.requests[name].priority <= 0:
            return self.world.tpot_s
        return best_effort_s

    def _check_bound(self, tpot_s: float, prompt_tokens: int, left_out: int, spare: float) -> None:
        """left_out: decodes and landed requests without a place or a block; vLLM gives their tokens to prompts."""
        within = (ALPHA * tpot_s + spare - COSTS.decode_step_s) / COSTS.prefill_s_per_token
        allowed = max(BLOCK_SIZE, within) + left_out
        assert prompt_tokens < allowed + 0.5, f"{prompt_tokens} prompt tokens beside decodes, {allowed:g} are allowed"

    def _landed(self) -> list[str]:
        """Those that need one token."""
        scheduler = self.engine.scheduler
        return [
            each.request_id
            for each in scheduler.kv_holding_waiting
            if each.request_id in self.pulled
            and (each.status is not LOADING or each.request_id in scheduler.finished_recving_kv_req_ids)
            and each.request_id not in scheduler.failed_recving_kv_req_ids
            and each.num_computed_tokens >= max(1, each.num_tokens - 1)
        ]

    def _with_room(self, landed: list[str]) -> list[str]:
        """All of them, or none where they may not find a place and a block each."""
        most = len(self.engine.scheduler.running) + len(landed)
        has_room = most <= self.world.places and self.engine.free_blocks() > most
        return landed if has_room and not self.world.adapters else []

    def _check_step(self) -> None:
        self._check_progress()
        self.check_books()

    def check_books(self) -> None:
        scheduler = self.engine.scheduler
        batching = scheduler.batching
        if batching is None:
            return
        batching.tree.check_invariants()
        batching.shares.check_invariants()
        alive = {name for name, each in scheduler.requests.items() if not each.is_finished()}
        # The scheduler's own rule: who of all that it knows the core should know.
        members = {name for name in alive if scheduler._joins_batch(scheduler.requests[name])}
        waiting = {member.request_id for member in batching.waiting()}
        batch = {member.request_id for member in batching.batch()}
        assert waiting | batch == members, f"the core knows {waiting | batch}, and should know {members}"
        queued = [each.request_id for each in (*scheduler.waiting, *scheduler.kv_holding_waiting, *scheduler.running)]
        assert sorted(queued) == sorted(alive), "a request is lost, or there twice"
        # A request that is put back after its load has failed is noticed with the next step.
        unnoticed = {each.request_id for each in scheduler.waiting} & batch
        assert not unnoticed & self.unnoticed, f"{unnoticed} wait, and run for the core"
        self.unnoticed = unnoticed
        pulling = {name for name in members if scheduler.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS}
        assert pulling <= batch, "the core does not know who loads"
        running = {each.request_id for each in scheduler.running} & members
        assert running <= batch, f"{running - batch} run, and wait for the core"

    def _compare(self) -> None:
        super()._compare()
        self.tally.wrong += [
            f"{name}: what was leased is not there" for name, is_there in self.engine.runner.read_leases.items()
            if not is_there
        ]  # fmt: skip
        chunks = self.engine.scheduler.chunks
        self.tally.bounded += chunks[Limit.TPOT] + chunks[Limit.PROGRESS]
        self.tally.yielded += sum(chunks[each] for each in _YIELDS)


def _left_tokens(request: Any) -> int:
    """What there is to compute of it now."""
    return int(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens)


def simulate(world: World, seed: int) -> Tally:
    """Raises AssertionError when blocks are lost, nothing moves or a bound is passed; the tally has wrong answers."""
    with SteppedClock() as clock:
        return SharedSimulation(world, seed, clock).run()


def play(seed: int, first: int = 0, **fixed: Any) -> Iterator[Tally]:
    """Worlds without end, from number `first` on: the tally of each, with what broke among its findings."""
    for number in count(first):
        world = replace(drawn(random.Random(f"shared {seed}/{number}")), **fixed)
        try:
            tally = simulate(world, number)
        except Exception as error:  # noqa: BLE001 - whatever breaks in a world is a finding
            tally = Tally(wrong=[raised(error)])
        tally.wrong = [f"world {number} of seed {seed}, {world}: {each}" for each in tally.wrong]
        yield tally
