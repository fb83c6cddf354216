"""One run: the plan is played in virtual time, healed, left in peace, sent requests again, and looked at."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rachis.v1 import admin_pb2 as admin

from fault_sim import invariants, virtual_time
from fault_sim.clients import Answer, Client
from fault_sim.faults import Faults
from fault_sim.invariants import Violation
from fault_sim.network import BREAK_S
from fault_sim.plan import HEALED_S, Plan, Request
from fault_sim.world import LEASE_S, REQUEST_TIMEOUT_S, World, noting_defects

# What was begun may take its whole time after everything is healed; a connection that broke silently is noticed.
_REQUESTS_S = HEALED_S + REQUEST_TIMEOUT_S + 20
_QUIET_S = BREAK_S + 2 * LEASE_S
_PROBES = 4
_LEFT_S = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """trace_hash: of everything that happened, in order. codes: how many clients got which status."""

    plan: Plan
    violations: tuple[Violation, ...]
    trace: tuple[str, ...]
    codes: Counter[str]
    handoffs: Counter[str]
    # Of answers that went on elsewhere, how often they did; of those that went on at another router.
    migrations: int
    resumes: int
    # How often a decode worker handed an answer over.
    handed_over: int
    virtual_s: float

    @property
    def trace_hash(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def play(plan: Plan) -> Result:
    """Never raises for what the production code does: that is a violation."""
    world = World(plan)
    answers: list[Answer] = []
    violations: list[Violation] = []
    try:
        with noting_defects(world):
            virtual_time.run(_play(world, answers, violations), plan.seed)
    except virtual_time.Deadlock as error:
        violations.append(Violation("hangs", str(error)))
    except virtual_time.Spinning as error:
        violations.append(Violation("spins", str(error)))
    violations += invariants.of_defects(world)
    last_s = float(world.trace[-1].split()[0]) if world.trace else 0.0
    codes, handoffs = Counter(answer.code for answer in answers), Counter(answer.handoff for answer in answers)
    migrations = sum(answer.migrations for answer in answers)
    resumes = sum(answer.resumes for answer in answers)
    engines = [each.engine for each in world.started if each.engine is not None and each.name.startswith("decode")]
    handed_over = sum(engine.status().counters.handoffs_leased for engine in engines)
    return Result(
        plan, tuple(violations), tuple(world.trace), codes, handoffs, migrations, resumes, handed_over, last_s
    )


async def _play(world: World, answers: list[Answer], violations: list[Violation]) -> None:
    await world.start()
    inflict = Faults(world).inflict
    faults = [asyncio.create_task(inflict(fault)) for fault in world.plan.faults]
    clients = [asyncio.create_task(_ask(world, request, answers)) for request in world.plan.requests]
    # Longer than any of it may take: a task that has not ended by then hangs.
    if faults or clients:
        await asyncio.wait([*faults, *clients], timeout=_REQUESTS_S)
    for task in clients:
        task.cancel()
    await asyncio.gather(*faults)
    await asyncio.gather(*clients, return_exceptions=True)
    await asyncio.sleep(_QUIET_S)
    violations += invariants.of_quiet(world)
    violations += await _served_again(world, answers)
    violations += await _index_agrees(world)
    violations += invariants.of_answers(world, answers)
    violations += invariants.of_cancelling(world)
    violations += invariants.of_caches(world)
    violations += invariants.of_poison(world)
    violations += invariants.of_sends(world)
    if not world.plan.faults:
        violations += invariants.of_calm(world, answers)
    elif world.plan.always_has_workers:
        violations += invariants.of_survival(world, answers)
    await world.stop()
    violations += await _left_tasks()
    world.note("the end")


async def _ask(world: World, request: Request, answers: list[Answer]) -> None:
    await asyncio.sleep(request.at_s)
    client = Client(request, lambda turn: world.api(request.number + turn), world.note)
    answers.append(client.answer)
    await client.run()


async def _served_again(world: World, answers: list[Answer]) -> list[Violation]:
    """Requests after the quiet are answered, over both pools, and leave nothing behind either."""
    last = max((request.number for request in world.plan.requests), default=0)
    probes = [
        Request(last + 1 + place, 0.1 * place, family=0, shared_tokens=40, own_tokens=9, variant=place, max_tokens=6)
        for place in range(_PROBES)
    ]
    before = len(answers)
    tasks = [asyncio.create_task(_ask(world, probe, answers)) for probe in probes]
    await asyncio.wait(tasks)
    await asyncio.sleep(2 * LEASE_S)
    failed = [answer for answer in answers[before:] if answer.code != "OK"]
    found = [
        Violation("recovers", f"{each.name} heard {each.code} {each.details!r} after the quiet") for each in failed
    ]
    return found + [
        replace(violation, what=f"after the last requests: {violation.what}")
        for violation in invariants.of_quiet(world)
    ]


async def _index_agrees(world: World) -> list[Violation]:
    """Every router believes of every worker just what its block pool holds."""
    checks = [await router.admin.CheckIndex(admin.CheckIndexRequest()) for router in world.living_routers]
    return [violation for check in checks for violation in _of_checks(check.workers)]


def _of_checks(checks: Any) -> Iterator[Violation]:
    for check in checks:
        if check.error or check.device.missing or check.device.untrue:
            counts = f"{check.device.missing} chunks are missing, {check.device.untrue} are untrue"
            yield Violation("index", f"{check.worker_id}: {check.error or counts}")


async def _left_tasks() -> list[Violation]:
    await asyncio.sleep(_LEFT_S)
    left = sorted(str(task.get_coro()) for task in asyncio.all_tasks() - {asyncio.current_task()})
    return [Violation("hangs", f"still runs after the end: {name}") for name in left]
