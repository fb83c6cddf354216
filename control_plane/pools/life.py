"""The life of the pools: brought up, scaled, drained, restarted one by one, taken down.

Every change of one worker is one task, which goes on when whoever asked for it has left. A worker's end:

    draining    no router sends it anything new; what runs there ends, sessions that wait for input move
    idle        no call, and no lease that a decode worker might still pull
    stopped     its engine, its registration, its actor

A worker that has not become idle in `limits.drain_timeout_s` leaves all the same; what it still ran then is told.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial

from rachis.v1 import admin_pb2 as admin

from cluster_configs.schema import RachisConfig
from cluster_core.background import BackgroundTasks
from cluster_core.clock import monotonic_s
from cluster_core.errors import (
    InvalidInputError,
    NotFoundError,
    OutOfOrderError,
    RachisError,
    StartError,
    UnavailableError,
)
from cluster_wire.redis_loop import LoopWords, RedisLoop
from control_plane.fleet.fencing import Fence
from control_plane.fleet.membership import Membership
from control_plane.fleet.worker_client import WorkerClient
from control_plane.model.limits import MOST_WORKERS
from control_plane.model.worker_snapshot import Pool
from control_plane.pools.actors import Actors
from control_plane.pools.changes import followed
from control_plane.pools.draining import Draining
from control_plane.pools.kept_sizes import KeptSizes
from control_plane.pools.pool_sections import LEAST_WORKERS, POOL_NAMES, sections
from control_plane.pools.roster import PoolWorker, Roster
from control_plane.pools.timing import POOL_TIMING, PoolTiming

logger = logging.getLogger(__name__)

_READY = admin.POOL_PHASE_READY
# Each time is a line in the log.
_FENCE_AGAIN_S = 2.0
# An outage of Ray is said as a defect is: once, with where it was noticed.
_NOT_SAID = "Ray does not say which workers have a process"
_RAY = LoopWords(logger, f"{_NOT_SAID}: %s", "Ray says again which workers have a process", _NOT_SAID)
_NOT_SEEN = "the pools could not be looked at"
_LOOKS = LoopWords(logger, f"{_NOT_SEEN}: %s", "the pools are looked at again", _NOT_SEEN)


class Pools:
    """Of one service; owned by the process that runs its controller. `start`, then `stop`.

    membership, client: the router's own.
    """

    def __init__(
        self,
        config: RachisConfig,
        actors: Actors,
        membership: Membership,
        client: WorkerClient,
        fence: Fence,
        kept: KeptSizes,
        timing: PoolTiming = POOL_TIMING,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._limits = config.limits
        self._registration_s = config.redis.worker_lease_s
        self._actors = actors
        self._membership = membership
        self._draining = Draining(config.limits, membership, client, timing.look_every_s, now_s)
        self._fence = fence
        self._kept = kept
        self._timing = timing
        self._now_s = now_s
        pools = sections(config.pools)
        self._sizes = {pool: section.workers for pool, section in pools.items()}
        self._autoscale = {pool: each.autoscale for pool, each in pools.items() if each.autoscale.enabled}
        self._roster = Roster(
            {pool: section.minimum for pool, section in pools.items()},
            {pool: settings.min_workers for pool, settings in self._autoscale.items()},
        )
        self._is_started = False
        self._followed_restarts = 0
        # Of single workers, and what watches all of them.
        self._changes = BackgroundTasks(lambda error: logger.error("%s", error))
        self._watching = BackgroundTasks()
        # The start of each worker, until it is over.
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._without_node: Mapping[str, str] = {}
        self._rays_word_s = 0.0
        self._fence_again_s = 0.0

    def status(self) -> list[admin.PoolStatus]:
        return self._roster.status()

    async def start(self, on_phase: Callable[[str, str], None]) -> None:
        """Until enough workers of each pool are ready; the others may follow. Raises StartError when they are not."""
        self._begin()
        starts = [(worker, self._comes(worker)) for worker in self._added(self._sizes)]
        until_s = self._now_s() + self._limits.start_timeout_s
        while not (is_up := self._is_up()) or any(task.done() for _, task in starts):
            for worker, task in list(starts):
                on_phase(worker.worker_id, worker.detail or worker.in_words())
                if task.done():
                    starts.remove((worker, task))
                    self._check_possible(worker.pool, task.exception(), [other for other, _ in starts])
            if is_up:
                break
            if not starts and self._now_s() > until_s:
                raise StartError(f"workers were ready and are lost before the others came: {self._roster.missing()}")
            await asyncio.sleep(self._timing.look_every_s)
        self._is_started = True

    async def take_over(self, running: Mapping[str, Pool]) -> None:
        """In place of `start`, with the workers of a former start, by their ids: what is missing follows, what is too
        much leaves. Only their registrations are waited for, as long as those may take: the service was up before.

        Who was draining leaves: whoever saw to it is gone.
        """
        sizes = await self._kept.read()
        taken = [self._roster.take_over(worker_id, pool) for worker_id, pool in running.items()]
        self._begin()
        until_s = self._now_s() + self._registration_s
        while self._now_s() < until_s and not all(worker.seen_generation for worker in taken):  # noqa: ASYNC110
            await asyncio.sleep(self._timing.look_every_s)
        for worker in taken:
            if worker.phase == admin.POOL_PHASE_DRAINING:
                self._leaves(worker)
            else:
                self._coming[worker.worker_id] = self._changes.start(self._taken_over(worker))
        # Where nobody knows what was asked for, it is what runs.
        self._resized(sizes or {pool: len(self._roster.staying(pool)) or size for pool, size in self._sizes.items()})
        self._is_started = True

    def _begin(self) -> None:
        """Holds the roster against the registry and against what Ray says, until stopped. Ray is asked in a task of its
        own: one that hangs holds up nobody."""
        looks, asks = self._timing.look_every_s, self._timing.ask_ray_every_s
        self._watching.start(RedisLoop(self._look, partial(asyncio.sleep, looks), _LOOKS).run())
        self._watching.start(RedisLoop(self._ask_ray, partial(asyncio.sleep, asks), _RAY).run())

    async def stop(self, *, leave_workers: bool = False) -> None:
        """All workers, without draining: the router has seen to that. Or none, for the next controller."""
        await self._watching.cancel()
        await self._changes.cancel()
        ending = [] if leave_workers else self._roster.workers()
        stops = (self._actors.stop(worker.worker_id) for worker in ending)
        for outcome in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.error("a worker did not stop: %s", outcome)
        await self._kept.close()
        await self._fence.close()

    async def scale(self, sizes: Mapping[Pool, int]) -> AsyncGenerator[admin.PoolEvent, None]:
        """Yields how it goes until what was added is ready and what was too much has left.

        Raises InvalidInputError for a size that makes no service or that the pool would not keep, OutOfOrderError while
        the service starts or workers are restarted, StartError when a worker does not come up.
        """
        self._check_sizes(sizes)
        self._check_quiet()
        workers, work = self._resized(sizes)
        async for event in followed(workers, work, self._timing.look_every_s):
            yield event

    def resize(self, pool: Pool, size: int) -> None:
        """The same without anybody who follows it."""
        self._check_sizes({pool: size})
        self._check_quiet()
        self._resized({pool: size})

    async def remove(self, worker_id: str, *, force: bool) -> AsyncGenerator[admin.PoolEvent, None]:
        """Drains it, and has it leave. Raises NotFoundError; OutOfOrderError when it is the last, unless forced."""
        worker = self._named(worker_id)
        if not force and self._is_last(worker):
            raise OutOfOrderError(
                f"without {worker_id} no {POOL_NAMES[worker.pool]} worker is ready, and nothing is served; "
                f"add one first (`rachis scale {POOL_NAMES[worker.pool]}=2`), or say --force",
                field="worker_id",
            )
        async for event in followed([worker], [self._leaves(worker)], self._timing.look_every_s):
            yield event

    async def restart(self, worker_ids: Sequence[str]) -> AsyncGenerator[admin.PoolEvent, None]:
        """One after the other; closing this ends it after the one whose turn it is.

        Where none is named: all that have a process. Raises NotFoundError, OutOfOrderError while the service starts or
        workers are being restarted, and StartError when one does not come back: those after it are left as they are.
        """
        self._check_quiet()
        having = [worker for worker in self._roster.workers() if worker.phase != admin.POOL_PHASE_PENDING]
        workers = [self._named(name) for name in worker_ids] or having
        self._followed_restarts += 1
        try:
            for index, worker in enumerate(workers):
                if worker.leaves or self._roster.get(worker.worker_id) is not worker:
                    continue
                worker.restarts = True
                work = [self._changes.start(self._start_again(worker))]
                async for event in followed([worker], work, self._timing.look_every_s, done=index, of=len(workers)):
                    yield event
        finally:
            self._followed_restarts -= 1

    @property
    def followed_restarts(self) -> int:
        """Rolling restarts that somebody follows."""
        return self._followed_restarts

    def restarting(self) -> bool:
        """Workers are being restarted one by one: pools keep their sizes meanwhile."""
        return self._followed_restarts > 0 or any(worker.restarts for worker in self._roster.workers())

    def _check_started(self) -> None:
        if not self._is_started:
            raise OutOfOrderError("the service is still starting; wait until it serves", field="pools")

    def _check_quiet(self) -> None:
        self._check_started()
        if self.restarting():
            raise OutOfOrderError("workers are being restarted one by one; wait for that to end", field="pools")

    def _check_sizes(self, sizes: Mapping[Pool, int]) -> None:
        for pool, size in sizes.items():
            if pool not in self._sizes:
                there = " and ".join(POOL_NAMES[each] for each in self._sizes)
                raise InvalidInputError(f"this service has no such pool, it has {there}", field=POOL_NAMES[pool])
            if not 0 <= size <= MOST_WORKERS:
                raise InvalidInputError(f"must be from 0 to {MOST_WORKERS}, got {size}", field=POOL_NAMES[pool])
            follows = self._autoscale.get(pool)
            if follows is not None and not follows.min_workers <= size <= follows.max_workers:
                between = f"{follows.min_workers} to {follows.max_workers}"
                raise InvalidInputError(
                    f"follows its load with {between} workers, and would not keep {size}", field=POOL_NAMES[pool]
                )
            if size < LEAST_WORKERS.get(pool, 0):
                name = POOL_NAMES[pool]
                raise InvalidInputError(f"must be at least 1: without a {name} worker nothing is served", field=name)

    def _named(self, worker_id: str) -> PoolWorker:
        self._check_started()
        worker = self._roster.get(worker_id)
        if worker is None:
            known = ", ".join(worker.worker_id for worker in self._roster.workers()) or "none"
            raise NotFoundError(f"no worker `{worker_id}`; there are: {known}", field="worker_id")
        if worker.leaves or worker.restarts:
            doing = "on its way out" if worker.leaves else "being restarted"
            raise OutOfOrderError(f"{worker_id} is {doing} already", field="worker_id")
        return worker

    def _is_last(self, worker: PoolWorker) -> bool:
        others = [other for other in self._roster.workers(worker.pool) if other is not worker and not other.leaves]
        return worker.pool in LEAST_WORKERS and not any(other.phase == _READY for other in others)

    def _is_up(self) -> bool:
        return all(self._roster.ready(pool) >= minimum for pool, minimum in self._roster.minimum.items())

    def _check_possible(self, pool: Pool, failure: BaseException | None, coming: Iterable[PoolWorker]) -> None:
        """Raises StartError when with those that still come the pool has too few."""
        hoped_for = self._roster.ready(pool) + sum(worker.pool == pool for worker in coming)
        minimum = self._roster.minimum[pool]
        if failure is not None and hoped_for < minimum:
            raise StartError(f"{failure} (at least {minimum} have to be ready)", field=f"pools.{POOL_NAMES[pool]}")

    def _added(self, numbers: Mapping[Pool, int]) -> list[PoolWorker]:
        return [self._roster.add(pool) for pool, number in numbers.items() for _ in range(number)]

    def _resized(self, sizes: Mapping[Pool, int]) -> tuple[list[PoolWorker], list["asyncio.Task[None]"]]:
        """Who comes or goes for pools to have these sizes, and what is done about each."""
        added = self._added({pool: size - len(self._roster.staying(pool)) for pool, size in sizes.items()})
        surplus = [worker for pool, size in sizes.items() for worker in self._roster.surplus(pool, size)]
        return [*added, *surplus], [*map(self._comes, added), *map(self._leaves, surplus)]

    def _comes(self, worker: PoolWorker) -> "asyncio.Task[None]":
        coming = self._coming[worker.worker_id] = self._changes.start(self._bring_up(worker))
        return coming

    def _leaves(self, worker: PoolWorker) -> "asyncio.Task[None]":
        worker.leaves = True
        return self._changes.start(self._take_down(worker))

    async def _bring_up(self, worker: PoolWorker) -> None:
        """Returns once it is ready, or is to end. Raises StartError; Ray goes on trying then."""
        await self._actors.start(worker.pool, worker.worker_id)
        await self._until_ready(worker)

    async def _taken_over(self, worker: PoolWorker) -> None:
        """One that does not serve is started again: it may have been stopped, drained or frozen before."""
        try:
            await self._until_ready(worker)
        except StartError as error:
            logger.error("%s was taken over and does not serve, it is started again: %s", worker.worker_id, error)
            self._coming.pop(worker.worker_id, None)
            worker.restarts = True
            await self._start_again(worker)

    async def _until_ready(self, worker: PoolWorker) -> None:
        failing = asyncio.create_task(self._actors.failure(worker.worker_id))
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                while worker.phase != _READY and not (worker.leaves or worker.is_down):
                    await asyncio.wait({failing}, timeout=self._timing.look_every_s)
                    if failing.done() and not (worker.leaves or worker.is_down):
                        worker.trouble = failing.result()
                        raise StartError(worker.trouble)
        except TimeoutError:
            timeout_s = self._limits.start_timeout_s
            raise StartError(
                f"{worker.worker_id} is not ready after {timeout_s:g} s: {worker.in_words()}; it is used once it is"
            ) from None
        finally:
            failing.cancel()

    async def _take_down(self, worker: PoolWorker) -> None:
        await self._end(worker)
        self._roster.remove(worker)

    async def _end(self, worker: PoolWorker) -> None:
        """Of its present start nothing is left, and nothing comes back, also of one whose host cannot be reached."""
        coming = self._coming.pop(worker.worker_id, None)
        if coming is not None:
            # It may be just asking Ray for a process.
            await asyncio.wait({coming})
        await self._draining.until_idle(worker)
        await self._actors.stop(worker.worker_id)
        worker.past_generation = worker.seen_generation
        if worker.past_generation and not await self._fence.close_out(worker.worker_id, worker.past_generation):
            self._roster.to_fence[worker.worker_id] = worker.past_generation

    async def _start_again(self, worker: PoolWorker) -> None:
        """One that is the last of its kind has another one stand in for it meanwhile."""
        stand_in = None
        try:
            stand_in = await self._stand_in(worker) if self._is_last(worker) else None
            worker.is_down = True
            await self._end(worker)
            worker.generation = 0
            worker.is_at(admin.POOL_PHASE_STARTING)
            worker.is_down = False
            await self._bring_up(worker)
        except RachisError:
            if stand_in is not None:
                # It is needed now.
                stand_in.stands_in = False
            raise
        finally:
            worker.restarts = worker.is_down = False
        if stand_in is not None:
            await self._leaves(stand_in)

    async def _stand_in(self, worker: PoolWorker) -> PoolWorker:
        stand_in = self._roster.add(worker.pool)
        stand_in.stands_in = True
        coming = self._comes(stand_in)
        room_until_s = self._now_s() + self._timing.stand_in_room_s
        while not coming.done():
            worker.is_at(worker.phase, f"waits for {stand_in.worker_id}, which stands in for it")
            if stand_in.phase == admin.POOL_PHASE_PENDING and self._now_s() > room_until_s:
                break
            await asyncio.wait({coming}, timeout=self._timing.look_every_s)
        if coming.done() and coming.exception() is None:
            return stand_in
        why = str(coming.exception()) if coming.done() else stand_in.detail
        await self._leaves(stand_in)
        raise OutOfOrderError(
            f"{worker.worker_id} is the only {POOL_NAMES[worker.pool]} worker, "
            f"and another one cannot stand in for it: {why}",
            field="worker_ids",
        )

    async def _look(self) -> None:
        now_s = self._now_s()
        fresh = now_s - self._rays_word_s < self._timing.believe_ray_s
        registrations = [member.registration for member in self._membership.members()]
        self._roster.observe(registrations, self._without_node if fresh else {}, now_s)
        if self._is_started:
            self._kept.keep({pool: len(self._roster.staying(pool)) for pool in self._sizes})
        for worker_id, generation in list(self._roster.to_fence.items()) if now_s >= self._fence_again_s else ():
            if not await self._fence.close_out(worker_id, generation):
                # Not the others either; the registry is looked at meanwhile.
                self._fence_again_s = now_s + _FENCE_AGAIN_S
                return
            logger.warning("%s is gone: its generation %d is fenced", worker_id, generation)
            self._roster.fenced(worker_id, generation)

    async def _ask_ray(self) -> None:
        asked_s = self._now_s()
        try:
            self._without_node = await self._actors.without_node()
        except Exception as error:  # whatever Ray raises while it is away, which is one outage
            raise UnavailableError("Ray does not answer") from error
        self._rays_word_s = asked_s
