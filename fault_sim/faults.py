"""What each kind of fault does to a world, and how it ends."""

import asyncio

from fault_sim.network import Link
from fault_sim.plan import REDIS, Fault
from fault_sim.world import World


class Faults:
    """`_begin_` and `_end_` of each kind: its names are those of `plan`."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def inflict(self, fault: Fault) -> None:
        """From its beginning to its end."""
        await asyncio.sleep(fault.at_s)
        self._world.note(f"{fault.kind} {fault.target} {fault.value:g}")
        await getattr(self, f"_begin_{fault.kind}")(fault)
        await asyncio.sleep(fault.for_s)
        self._world.note(f"{fault.kind} {fault.target} is over")
        await getattr(self, f"_end_{fault.kind}")(fault)

    def _link(self, fault: Fault) -> Link:
        one, _, other = fault.target.partition("|")
        return self._world.network.link(one, other)

    async def _begin_kill(self, fault: Fault) -> None:
        await self._world.workers[fault.target].kill()

    async def _end_kill(self, fault: Fault) -> None:
        await self._world.restart_worker(fault.target)

    async def _begin_kill_router(self, fault: Fault) -> None:
        """Where several kill it, the first one starts it again."""
        if fault.target in self._world.living:
            self._world.kill_router(fault.target)

    async def _end_kill_router(self, fault: Fault) -> None:
        if fault.target not in self._world.living:
            await self._world.start_router(fault.target)

    async def _begin_drain(self, fault: Fault) -> None:
        self._set_draining(fault, draining=True)

    async def _end_drain(self, fault: Fault) -> None:
        self._set_draining(fault, draining=False)

    def _set_draining(self, fault: Fault, *, draining: bool) -> None:
        self._world.workers[fault.target].set_draining(draining=draining)

    async def _begin_stall(self, fault: Fault) -> None:
        engine = self._world.workers[fault.target].engine
        if engine is not None:
            engine.hang()
        self._world.stall_begins(fault.target)

    async def _end_stall(self, fault: Fault) -> None:
        """Whichever start of the worker it is by now."""
        self._world.stall_ends(fault.target)
        engine = self._world.workers[fault.target].engine
        if engine is not None:
            engine.go_on()

    async def _begin_freeze(self, fault: Fault) -> None:
        await self._begin_stall(fault)
        for link in self._links_of(fault.target):
            link.cut()

    async def _end_freeze(self, fault: Fault) -> None:
        for link in self._links_of(fault.target):
            link.heal()
        await self._end_stall(fault)

    def _links_of(self, name: str) -> list[Link]:
        return [
            self._world.network.link(name, other)
            for other in (*self._world.routers, REDIS, *self._world.workers)
            if other != name
        ]

    async def _begin_freeze_pulls(self, fault: Fault) -> None:
        self._link(fault).is_frozen = True

    async def _end_freeze_pulls(self, fault: Fault) -> None:
        self._link(fault).is_frozen = False

    async def _begin_poison(self, fault: Fault) -> None:
        self._world.fabric.poison |= self._poison(fault)

    async def _end_poison(self, fault: Fault) -> None:
        self._world.fabric.poison -= self._poison(fault)

    def _poison(self, fault: Fault) -> set[tuple[int, ...]]:
        return {tuple(each.prompt) for each in self._world.plan.requests if each.number == fault.value}

    async def _begin_slow_engine(self, fault: Fault) -> None:
        self._slow_down(fault.target, fault.value)

    async def _end_slow_engine(self, fault: Fault) -> None:
        self._slow_down(fault.target, 1.0)

    def _slow_down(self, name: str, factor: float) -> None:
        engine = self._world.workers[name].engine
        if engine is not None:
            engine.slow = factor

    async def _begin_slow_link(self, fault: Fault) -> None:
        self._link(fault).slow = fault.value

    async def _end_slow_link(self, fault: Fault) -> None:
        self._link(fault).slow = 1.0

    _begin_slow_pulls, _end_slow_pulls = _begin_slow_link, _end_slow_link

    async def _begin_cut(self, fault: Fault) -> None:
        self._link(fault).cut()

    async def _end_cut(self, fault: Fault) -> None:
        self._link(fault).heal()

    _begin_cut_registry, _end_cut_registry = _begin_cut, _end_cut

    async def _begin_reset(self, fault: Fault) -> None:
        self._link(fault).reset(fault.value)

    async def _end_reset(self, fault: Fault) -> None:
        """It was over at once."""

    _begin_half_open, _end_half_open = _begin_reset, _end_reset

    async def _begin_loss(self, fault: Fault) -> None:
        self._link(fault).loss = fault.value

    async def _end_loss(self, fault: Fault) -> None:
        self._link(fault).loss = 0.0

    async def _begin_repeat(self, fault: Fault) -> None:
        self._link(fault).repeats = fault.value

    async def _end_repeat(self, fault: Fault) -> None:
        self._link(fault).repeats = 0.0

    async def _begin_redis_down(self, fault: Fault) -> None:
        self._world.store.is_down = True

    async def _end_redis_down(self, fault: Fault) -> None:
        self._world.store.is_down = False

    _begin_redis_empty = _begin_redis_down

    async def _end_redis_empty(self, fault: Fault) -> None:
        self._world.store.flushall()
        self._world.store.is_down = False
