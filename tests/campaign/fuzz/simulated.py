"""Random sessions through the real schedulers, on a model runner that checks the KV it computes with.

`simulate` plays one seeded world: sessions that append, update, finish and are cancelled, plain requests beside them, a
pool so small that somebody is always preempted, host memory for some of what is, loads that land late. Every answer is
compared with that of a fresh request with the final prompt; blocks and host slots are counted after every step.

Now and then nothing comes for a while: sessions are idle and hold what they hold. In such a time whoever can be
computed has to be, since nobody's next move will make room for it.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from cluster_core.engine_jobs import SessionMode
from kv_transfer.tiers.tier_terms import TierCounters
from tests.campaign.fuzz.kv_checking_runner import adapter, expected_tokens
from tests.campaign.fuzz.session_moves import Client, Kind
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, STEP_S, SimulatedEngine, SteppedClock
from tests.campaign.fuzz.tally import Tally, raised
from tests.campaign.fuzz.worlds import World, share_of

_MOST_TOKENS = 6
# A step in which a session does something: one of about so many.
_ACTIVITY = 0.15
# A quiet time begins in one of about so many steps, and lasts so many.
_QUIET = 0.01
_QUIET_STEPS = (20, 100)
# Steps that may compute nothing, one after the other, while somebody could be computed: copies and loads are under way.
_MOST_IDLE_STEPS = 40


@dataclass(slots=True)
class _Session:
    mode: SessionMode
    prompt: list[int]
    max_tokens: int


class Simulation:
    def __init__(self, world: World, seed: int, clock: SteppedClock) -> None:
        self.world = world
        self.clock = clock
        self.random = random.Random(seed)
        # Apart, so that a seed draws the same sessions as ever.
        self.adapting = random.Random(f"adapters {seed}")
        self.adapters: dict[str, int] = {}
        # Likewise.
        self.whose = random.Random(f"tenants {seed}")
        self.engine = SimulatedEngine(world)
        self.client = Client(self.random, longest=(world.blocks - 1) * BLOCK_SIZE - _MOST_TOKENS)
        self.tally = Tally()
        self.open: dict[str, _Session] = {}
        self.expected: dict[str, list[int]] = {}
        self.ended_sessions = 0
        self.started = 0
        self.quiet_steps = 0
        self.idle_steps = 0

    def run(self) -> Tally:
        everybody = self.world.sessions + self.world.requests
        for _ in range(800 * everybody):
            if not self._is_quiet():
                self._arrive()
                for name in list(self.open):
                    if self.random.random() < _ACTIVITY:
                        self._carry_out(name)
            self.clock.advance(STEP_S)
            if not self.engine.turn() and self.started == everybody and not self.open:
                break
            self.engine.check_invariants()
            self._check_step()
            self.engine.outputs.clear()
        else:
            raise AssertionError(f"stuck: {sorted(self.engine.scheduler.requests)}")
        self._compare()
        self.engine.check_idle()
        return self.tally

    def _is_quiet(self) -> bool:
        if self.quiet_steps:
            self.quiet_steps -= 1
        elif self.random.random() < _QUIET:
            self.quiet_steps = self.random.randrange(*_QUIET_STEPS)
        return self.quiet_steps > 0

    def _check_step(self) -> None:
        self._check_progress()

    def _check_progress(self) -> None:
        """Where somebody can be computed, some step soon computes something.

        Not asked of prefill workers with loads from elsewhere, which none of a service has: a prompt whose load is
        longer than a step's budget can starve there beside an idle session, as one in host memory once could.
        """
        if self.world.loads and not self.world.is_shared:
            return
        has_computed = any(output.total_num_scheduled_tokens for output in self.engine.outputs)
        waiting = [] if has_computed else self.engine.computable()
        self.idle_steps = self.idle_steps + 1 if waiting else 0
        assert self.idle_steps <= _MOST_IDLE_STEPS, f"{self.idle_steps} steps computed nothing, {waiting} wait"

    def _arrive(self) -> None:
        world, rng = self.world, self.random
        if self.started == world.sessions + world.requests or rng.random() > 0.25:
            return
        name, max_tokens = str(self.started), rng.choice((1, 1, 1, 2, _MOST_TOKENS))
        self.started += 1
        is_plain = rng.random() * (world.sessions + world.requests) < world.requests
        prompt = self.client.prompt() if is_plain else self.client.first_prompt()
        if rng.random() < world.loads and prompt:
            self._draw_load(name, prompt, is_plain=is_plain)
        number = self.adapters[name] = self.adapting.randrange(world.adapters + 1)
        priority = (0, 1, 0, -1)[self.started % 4] if world.has_priorities else 0
        fields = {
            "lora_request": adapter(number),
            "priority": priority,
            "tenant": share_of(self.whose.randrange(world.tenants + 1)),
        }
        if is_plain:
            self.expected[name] = expected_tokens(prompt, max_tokens, number)
            self.tally.requests += 1
            self._add(name, prompt, max_tokens, **fields)
            return
        session = self.open[name] = _Session(rng.choice(list(SessionMode)), prompt, max_tokens)
        self.engine.open(name, prompt, max_tokens, session.mode, **fields)

    def _draw_load(self, name: str, prompt: list[int], *, is_plain: bool) -> None:
        self.engine.remote_tokens[name] = self.random.randrange(1, len(prompt) + 1)
        self.tally.loads += 1

    def _add(self, name: str, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        """A plain request."""
        self.engine.add(name, prompt, max_tokens, **fields)

    def _carry_out(self, name: str) -> None:
        session, engine = self.open[name], self.engine
        assert name in engine.scheduler.requests, f"{name} ended before its input was closed"
        for move in self.client.moves(session.prompt, session.mode, swapped=engine.is_swapped(name)):
            session.prompt = move.prompt_after(session.prompt)
            if move.kind is Kind.APPEND:
                engine.scheduler.extend_prompt(name, move.token_ids)
                self.tally.appends += 1
            elif move.kind is Kind.UPDATE:
                engine.scheduler.replace_prompt(name, move.token_ids)
                self.tally.updates += 1
            elif move.kind is Kind.CLOSE:
                engine.scheduler.close_input(name, move.token_ids)
                self.expected[name] = expected_tokens(session.prompt, session.max_tokens, self.adapters[name])
                self.tally.sessions += 1
                del self.open[name]
            else:
                engine.abort(name)
                self.tally.cancelled += 1
                del self.open[name]

    def _compare(self) -> None:
        for name, tokens in self.expected.items():
            if self.engine.answers.get(name) != tokens:
                self.tally.wrong.append(f"{name}: {self.engine.answers.get(name)} instead of {tokens}")
        for record in self.engine.records.values():
            self.tally.swaps += record.preemptions_swap
            self.tally.recomputes += record.preemptions_recompute
            self.tally.invalidated_tokens += record.tokens.invalidated_tokens
        self.tally.count_tiers(TierCounters(), self.engine.scheduler.tiers.counters)
        self.tally.swapped_back_async += self.engine.scheduler.swaps.counters.blocks_back_async


def simulate(world: World, seed: int) -> Tally:
    """Raises AssertionError when blocks are lost or nothing moves; wrong answers are in the tally."""
    with SteppedClock() as clock:
        return Simulation(world, seed, clock).run()


def play(seed: int, first: int = 0, **fixed: Any) -> Iterator[Tally]:
    """Worlds without end, from number `first` on: the tally of each, with what broke among its findings.

    fixed: fields of the worlds that are not drawn.
    """
    for number in count(first):
        world = replace(World.drawn(random.Random(f"{seed}/{number}")), **fixed)
        try:
            tally = simulate(world, number)
        except Exception as error:  # noqa: BLE001 - whatever breaks in a world is a finding
            tally = Tally(wrong=[raised(error)])
        tally.wrong = [f"world {number} of seed {seed}, {world}: {each}" for each in tally.wrong]
        yield tally
