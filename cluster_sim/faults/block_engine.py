"""An engine whose KV blocks have content: a token is right only when the blocks held what they should.

It steps in the loop's time, as vLLM does: between two steps it takes in what was asked of it, then each running request
gets tokens of the step's budget. Blocks run out: then the last request that came is preempted and computed again.

Who holds the blocks of a request:
    waits, or was preempted          nobody; the cache as far as it lasts
    is being pulled to               its run, which does not use them before the pull has ended, aborted or not
    runs                             its run
    finished, leased                 the lease, until it is pulled, released, or `lease_s` old
A pull reads blocks by number from whoever has them then, as RDMA does: what keeps it right are leases and deadlines.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster_core.clock import monotonic_s, unix_ms
from cluster_core.engine import (
    DecodeBatch,
    EngineCosts,
    EngineCounters,
    EngineInfo,
    EngineJob,
    EngineLoad,
    EngineOutput,
    EngineStatus,
    FinishReason,
    HandoffOutcome,
    HandoffReport,
    HotPrefix,
    KvLease,
    PrefixClaimChange,
    PrefixClaims,
    SessionMode,
)
from cluster_core.errors import InvalidInputError, UnavailableError
from cluster_sim.faults.block_pool import BlockPool, block_hash, first_kv, next_kv, next_token
from cluster_sim.faults.block_run import Run
from cluster_sim.faults.block_session import BlockSession
from cluster_sim.faults.network import Network
from kv_transfer.chunk_claims import ChunkClaims
from kv_transfer.handoff import Pull, effective_deadline, is_late, stamp_deadline
from kv_transfer.lease_params import decode_params, encode_params
from kv_transfer.prefix_chunks import root_key
from kv_transfer.radix_tree import Tier
from prefill_worker.sessions import longest_common_prefix

_MOST_RUNNING = 32
_STEP_TOKENS = 64
_KV_BYTES_PER_TOKEN = 64
# A transfer goes as fast as its link is for so long.
_SLICE_S = 0.1


@dataclass(frozen=True, slots=True)
class BlockEngineSettings:
    """step_s, token_s: what a step takes, and each token of it. pull_s, pull_token_s: the same of a pull."""

    blocks: int = 1024
    block_tokens: int = 4
    max_model_len: int = 4096
    deadline_s: float = 3.0
    lease_s: float = 6.0
    step_s: float = 0.005
    token_s: float = 0.0002
    pull_s: float = 0.01
    pull_token_s: float = 0.0005
    chunk_tokens: int = 128
    service_id: str = ""


class Fabric:
    """Engines by their ids, which are another for each start, and the links that pulls go over."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.engines: dict[str, BlockEngine] = {}


class BlockEngine:
    """See `cluster_core.engine.Engine`. slow: factor on what steps take. engine_id: unique in the fabric.

    poisoned: jobs that left blocks in the cache which hold something else than their names say.
    """

    def __init__(self, host: str, engine_id: str, fabric: Fabric, settings: BlockEngineSettings) -> None:
        self.host = host
        self.slow = 1.0
        self.poisoned: list[str] = []
        self.settings = settings
        self.pool = BlockPool(settings.blocks, settings.block_tokens)
        self.pool.on_evict = lambda name: self._claims.removed(Tier.DEVICE, [name])
        self._id = engine_id
        self._fabric = fabric
        fabric.engines[engine_id] = self
        self._claims = ChunkClaims(
            lambda salt, adapter: root_key(settings.service_id, salt, adapter),
            settings.block_tokens,
            -(-settings.chunk_tokens // settings.block_tokens),
        )
        self._on_change: Callable[[PrefixClaimChange], None] = lambda change: None
        self._waiting: deque[Run] = deque()
        self._running: list[Run] = []
        # Sessions whose blocks were taken while they had nothing to compute.
        self._parked: list[Run] = []
        self._names: dict[str, Run] = {}
        self._leases: dict[str, _Lease] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._counters = EngineCounters()
        self._costs = EngineCosts()
        self._dead: str | None = None

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        on_phase("serving")
        self._in_background(self._work())
        settings = self.settings
        return EngineInfo(
            "blocks", "bytes", 256, settings.max_model_len, settings.block_tokens, _MOST_RUNNING, "float32"
        )

    async def generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
        run = self._admit(job)
        try:
            async for output in self.outputs(run):
                yield output
        finally:
            self.leave(run)

    def open_session(self, job: EngineJob, mode: SessionMode) -> BlockSession:
        run = self._admit(job, may_be_empty=True)
        run.is_open = True
        session = run.session = BlockSession(self, run, mode)
        return session

    async def release(self, lease_id: str) -> bool:
        return bool(await self._between_steps(lambda: self._release(lease_id)))

    def status(self) -> EngineStatus:
        sessions = sum(run.is_open for run in self._names.values())
        load = EngineLoad(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            leased_handoffs=len(self._leases),
            free_blocks=self.pool.free,
            total_blocks=self.pool.total,
            open_sessions=sessions,
        )
        self._counters.stored_blocks = self._claims.stored_blocks
        return EngineStatus(load, replace(self._counters), costs=self._costs)

    async def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        return ()

    async def decode_batch(self, at_most: int) -> DecodeBatch:
        return DecodeBatch()

    def follow_claims(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        self._on_change = on_change
        self._claims.take()
        on_change(PrefixClaimChange(dict.fromkeys(self._claims.claims().device, True)))

    async def prefix_claims(self, on_look: Callable[[], None] = lambda: None) -> PrefixClaims:
        def look() -> PrefixClaims:
            on_look()
            return self._claims.audit(self.pool.published, ())

        return PrefixClaims() if self._dead is not None else await self._between_steps(look)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        self.die("stopped")
        if tasks:
            await asyncio.wait(tasks)

    def die(self, why: str) -> None:
        """At once: whoever waits for it hears so, its memory can be read no more."""
        if self._dead is not None:
            return
        self._dead = why
        del self._fabric.engines[self._id]
        for task in self._tasks:
            task.cancel()
        for run in list(self._names.values()):
            self._fail(run, UnavailableError(f"the engine died: {why}"))
        self._between_two_steps()

    def live_jobs(self) -> list[str]:
        """Names of the jobs that somebody waits for."""
        return [name for name, run in self._names.items() if not run.abandoned]

    def check_invariants(self) -> None:
        held = [run.blocks for run in {*self._running, *self._waiting, *self._names.values()}]
        self.pool.check_invariants([*held, *(lease.blocks for lease in self._leases.values())])

    # What its sessions ask of it.

    def longest_prompt(self, job: EngineJob) -> int:
        settings = self.settings
        room = min(settings.max_model_len, settings.blocks * settings.block_tokens)
        return room - job.sampling.max_tokens

    def wake(self) -> None:
        self._wake.set()

    def leave(self, run: Run) -> None:
        """Nobody waits for the run any more; it is aborted where it has not ended."""
        run.abandoned = True
        self._commands.append(lambda: self._abort(run))
        self.wake()
        if self._dead is not None:
            self._between_two_steps()

    async def outputs(self, run: Run) -> AsyncIterator[EngineOutput]:
        while True:
            item = await run.outputs.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.finish_reason is not None:
                return

    def replace_prompt(self, run: Run, tokens: list[int]) -> None:
        """Keeps the KV of the longest common prefix, up to a block less where others read that block."""
        size = self.settings.block_tokens
        keep = min(longest_common_prefix(run.tokens, tokens), run.computed)
        run.tokens = tokens
        if keep < run.computed and keep % size:
            last = run.blocks[keep // size]
            if self.pool.is_shared(last):
                keep -= keep % size
            else:
                self.pool.unpublish(last)
        run.names, run.right = run.names[: keep // size], run.right[: keep // size]
        if keep < run.computed:
            needed = -(-keep // size)
            self.pool.drop(run.blocks[needed:])
            del run.blocks[needed:]
            run.computed = keep

    # Its steps.

    async def _work(self) -> None:
        while True:
            self._between_two_steps()
            step = self._step()
            if not step:
                self._wake.clear()
                await self._wake.wait()
                continue
            tokens = sum(step.values())
            took_s = (self.settings.step_s + self.settings.token_s * tokens) * self.slow
            await asyncio.sleep(took_s)
            for run, count in step.items():
                # What the run was told meanwhile waits for the end of the step.
                self._compute(run, count)
            self._measure(took_s, tokens, len(step))
            self._tell()

    def _between_two_steps(self) -> None:
        while self._commands:
            self._commands.popleft()()
        for run in list(self._names.values()):
            if run.session is not None and run.session.take_in() and run in self._parked:
                self._parked.remove(run)
                self._waiting.append(run)
        if self._dead is None:
            self._admit_waiting()
        self._tell()

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._running) < _MOST_RUNNING:
            run = self._waiting[0]
            if not self._begin(run):
                return
            self._waiting.popleft()
            self._running.append(run)

    def _begin(self, run: Run) -> bool:
        """False while there is no memory for it. What of its tokens is cached is taken from there."""
        if run.pulls and self._is_too_late(run):
            run.pulls = False
        size = self.settings.block_tokens
        cached = self.pool.match(self._names_of(run, (len(run.tokens) - 1) // size if run.tokens else 0))
        needed = -(-len(run.tokens) // size)
        missing = needed - len(cached) + sum(not self.pool.is_held(block) for block in cached)
        while missing > self.pool.free and (idle := self._idle_holder()) is not None:
            self._preempt(idle)
        if missing > self.pool.free:
            return False
        self.pool.take(cached)
        run.blocks = cached
        run.computed = len(cached) * size
        if not run.is_started:
            run.cached_tokens = run.computed
        if run.session is not None:
            run.session.computed(0, cached=run.computed)
        if run.pulls:
            run.pulls = False
            self._pull(run)
        return True

    def _step(self) -> dict[Run, int]:
        """Tokens that each run gets computed; their blocks are there."""
        budget, step = _STEP_TOKENS, dict[Run, int]()
        for run in list(self._running):
            count = min(run.wanted - run.computed, budget)
            if run.pulling or count <= 0 or run not in self._running:
                continue
            if self._has_room(run, run.computed + count, step):
                step[run] = count
                budget -= count
        return step

    def _has_room(self, run: Run, tokens: int, step: dict[Run, int]) -> bool:
        while len(run.blocks) * self.settings.block_tokens < tokens:
            block = self.pool.allocate()
            if block is not None:
                run.blocks.append(block)
                continue
            victim = self._victim(run)
            if victim is None:
                return False
            self._preempt(victim)
            step.pop(victim, None)
            if victim is run:
                return False
        return True

    def _victim(self, wanting: Run) -> Run | None:
        """Whose blocks it gets: an idle session's, or those of the last that came, which may be its own."""
        idle = self._idle_holder(wanting)
        if idle is not None:
            return idle
        later = self._running[self._running.index(wanting) :]
        last = [run for run in later if run.blocks and not run.pulling][-1:]
        is_alone = not any(run.blocks and not run.pulling for run in self._running if run is not wanting)
        return last[0] if last and not (last[0] is wanting and is_alone) else None

    def _idle_holder(self, wanting: Run | None = None) -> Run | None:
        """A session that has nothing to compute, and blocks."""
        idle = (run for run in self._running if run.is_open and run.computed == run.wanted and run.blocks)
        return next((run for run in idle if run is not wanting), None)

    def _preempt(self, run: Run) -> None:
        """An idle session waits for more input, everybody else is next."""
        is_idle = run.is_open and run.computed == run.wanted
        self._running.remove(run)
        self._give_back(run)
        if is_idle:
            self._parked.append(run)
        else:
            self._waiting.appendleft(run)
        if run.session is not None:
            run.session.preempted()

    def _compute(self, run: Run, count: int) -> None:
        """Writes the KV of its next tokens; with the last one's comes the next token."""
        size = self.settings.block_tokens
        before = self._kv(run, run.computed - 1) if run.computed else first_kv(run.job.cache_salt)
        for place in range(run.computed, run.computed + count):
            before = next_kv(before, run.tokens[place])
            self.pool.kv[run.blocks[place // size]][place % size] = before
        run.computed += count
        if run.session is not None and run.computed <= run.prompt_tokens:
            run.session.computed(count)
        self._publish(run)
        if run.computed == len(run.tokens) and not run.is_open and not run.abandoned:
            self._generate(run)

    def _generate(self, run: Run) -> None:
        sampled = next_token([self._kv(run, place) for place in range(run.computed)], run.job.sampling)
        output = run.generated(sampled)
        self._counters.generated_tokens += len(output.token_ids)
        reason = output.finish_reason
        if reason is not None:
            if run.session is not None:
                output = replace(output, session=run.session.record())
            output = replace(output, lease=self._end(run, reason))
        run.outputs.put_nowait(output)

    def _kv(self, run: Run, place: int) -> bytes:
        size = self.settings.block_tokens
        return self.pool.kv[run.blocks[place // size]][place % size]

    def _publish(self, run: Run) -> None:
        """Its full blocks are found by others from now on."""
        size = self.settings.block_tokens
        full = run.computed // size
        names = self._names_of(run, full)
        for place in range(full):
            if self.pool.publish(run.blocks[place], names[place]):
                run.has_published = True
                self._check_content(run, place)
                tokens = run.tokens[place * size : (place + 1) * size]
                parent = names[place - 1] if place else None
                self._claims.stored(Tier.DEVICE, [names[place]], parent, tokens, run.job.cache_salt)

    def _check_content(self, run: Run, place: int) -> None:
        """Whoever finds a block by its name has to find what it says."""
        size, end = self.settings.block_tokens, (place + 1) * self.settings.block_tokens
        if len(run.right) * size < end:
            kv = run.right[-1] if run.right else first_kv(run.job.cache_salt)
            for position in range(len(run.right) * size, end):
                kv = next_kv(kv, run.tokens[position])
                if (position + 1) % size == 0:
                    run.right.append(kv)
        if self._kv(run, end - 1) != run.right[place]:
            self.poisoned.append(run.job.request_id)

    def _names_of(self, run: Run, blocks: int) -> list[bytes]:
        size = self.settings.block_tokens
        while len(run.names) < blocks:
            place = len(run.names) * size
            parent = run.names[-1] if run.names else None
            run.names.append(block_hash(parent, run.tokens[place : place + size], run.job.cache_salt))
        return run.names[:blocks]

    # Coming and going.

    def _admit(self, job: EngineJob, *, may_be_empty: bool = False) -> Run:
        if self._dead is not None:
            raise UnavailableError(f"the engine died: {self._dead}")
        if job.request_id in self._names or job.request_id in self._leases:
            raise InvalidInputError("is already running", field="request_id")
        if not (job.token_ids or may_be_empty) or len(job.token_ids) > self.longest_prompt(job):
            raise InvalidInputError(f"the prompt has {len(job.token_ids)} tokens", field="request")
        run = Run(job, list(job.token_ids), len(job.token_ids))
        if job.pull is not None:
            run.pulls = True
            run.deadline = effective_deadline(job.pull.deadline_unix_ms, unix_ms(), self.settings.deadline_s)
        self._names[job.request_id] = run
        self._counters.requests += 1
        self._counters.prompt_tokens += len(job.token_ids)
        self._commands.append(lambda: self._enter(run))
        self.wake()
        return run

    def _enter(self, run: Run) -> None:
        if not run.abandoned:
            self._waiting.append(run)

    def _end(self, run: Run, reason: FinishReason) -> KvLease | None:
        """Its answer is complete; its blocks go, or are leased."""
        self._running.remove(run)
        self._names.pop(run.job.request_id, None)
        self._counters.cacheable_requests += run.has_published
        if not run.job.hand_off or reason is not FinishReason.LENGTH:
            self._give_back(run)
            return None
        lease_id, blocks = run.job.request_id, run.blocks
        run.blocks = []
        timer = asyncio.get_running_loop().call_later(self.settings.lease_s, self._expire, lease_id)
        self._leases[lease_id] = _Lease(blocks, timer)
        self._counters.handoffs_leased += 1
        params = encode_params({"engine": self._id, "blocks": blocks, "tokens": run.prompt_tokens})
        return KvLease(lease_id, params, stamp_deadline(unix_ms(), self.settings.deadline_s))

    def _abort(self, run: Run) -> None:
        if self._names.get(run.job.request_id) is run:
            del self._names[run.job.request_id]
        if run in self._waiting:
            self._waiting.remove(run)
            if run.pulls:
                self._tell_peer(run)
        if run in self._parked:
            self._parked.remove(run)
        if run in self._running and not run.pulling:
            self._running.remove(run)
            self._give_back(run)

    def _fail(self, run: Run, error: Exception) -> None:
        run.outputs.put_nowait(error)
        if run.session is not None:
            run.session.fail(error)
        self.leave(run)

    def _give_back(self, run: Run) -> None:
        self.pool.drop(run.blocks)
        run.blocks = []
        run.computed = 0

    def _release(self, name: str) -> bool:
        run = self._names.get(name)
        if run is not None:
            self._fail(run, UnavailableError("the request was released"))
            return True
        released = self._free_lease(name)
        self._counters.handoffs_released += released
        return released

    def _expire(self, lease_id: str) -> None:
        def expire() -> None:
            self._counters.handoffs_expired += self._free_lease(lease_id)

        self._commands.append(expire)
        self.wake()

    def _free_lease(self, lease_id: str) -> bool:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        lease.timer.cancel()
        self.pool.drop(lease.blocks)
        return True

    async def _between_steps(self, command: Callable[[], Any]) -> Any:
        """What it gives, once the engine has had a moment."""
        if self._dead is not None:
            return command()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def carry_out() -> None:
            result = command()
            if not answer.done():
                answer.set_result(result)

        self._commands.append(carry_out)
        self.wake()
        return await answer

    # Pulls.

    def _is_too_late(self, run: Run) -> bool:
        """Its lease must not be pulled any more: it computes the prompt itself."""
        if not _is_late(run):
            return False
        run.report = HandoffReport(HandoffOutcome.RECOMPUTED)
        self._counters.handoffs_recomputed += 1
        return True

    def _pull(self, run: Run) -> None:
        missing = len(run.tokens) - 1 - run.computed
        if missing <= 0:
            run.report = HandoffReport(HandoffOutcome.LOCAL)
            self._tell_peer(run)
            return
        for _ in range(-(-len(run.tokens) // self.settings.block_tokens) - len(run.blocks)):
            block = self.pool.allocate()
            assert block is not None, "there was room"
            run.blocks.append(block)
        run.pulling = True
        self._in_background(self._transfer(run, missing))

    async def _transfer(self, run: Run, tokens: int) -> None:
        """Reads the blocks as they are when it ends."""
        assert run.job.pull is not None
        params = decode_params(run.job.pull.connector_params)
        first = run.computed // self.settings.block_tokens
        pull = Pull(monotonic_s(), tokens, tokens * _KV_BYTES_PER_TOKEN)
        content: list[list[bytes]] = []
        peer = self._fabric.engines.get(params["engine"])
        if peer is not None:
            link = self._fabric.network.link(self.host, peer.host)
            left_s = self.settings.pull_s + self.settings.pull_token_s * tokens
            while left_s > 0 and not (link.is_cut and _is_late(run)):
                took_s = min(left_s * link.slow, _SLICE_S)
                await asyncio.sleep(took_s)
                left_s -= 0 if link.is_cut else max(took_s / link.slow, 1e-9)
            if left_s <= 0 and params["engine"] in self._fabric.engines:
                content = [list(peer.pool.kv[block]) for block in params["blocks"][first:]]
        pull.ended_s = monotonic_s()
        pull.failed = not content or _is_late(run)
        self._commands.append(lambda: self._pulled(run, pull, content))
        self.wake()

    def _pulled(self, run: Run, pull: Pull, content: list[list[bytes]]) -> None:
        run.pulling = False
        if not pull.failed:
            self._tell_peer(run)
            self._counters.handoffs_pulled += 1
            self._counters.kv_bytes_pulled += pull.kv_bytes
        else:
            self._counters.handoffs_recomputed += 1
        if run.abandoned:
            self._abort(run)
            return
        run.report = pull.report()
        if not pull.failed:
            first = run.computed // self.settings.block_tokens
            for block, kv in zip(run.blocks[first:], content, strict=True):
                self.pool.kv[block][:] = kv
            run.computed = len(run.tokens) - 1

    def _tell_peer(self, run: Run) -> None:
        """The lease is not needed any more."""
        assert run.job.pull is not None
        self._in_background(self._tell_peer_of(run.job.pull))

    async def _tell_peer_of(self, lease: KvLease) -> None:
        engine_id = decode_params(lease.connector_params)["engine"]
        peer = self._fabric.engines.get(engine_id)
        if peer is None:
            return
        link = self._fabric.network.link(self.host, peer.host)
        await asyncio.sleep(link.delay_s())
        if not link.is_cut:
            peer.pulled(lease.lease_id)

    def pulled(self, lease_id: str) -> None:
        """A peer has what it wanted of a lease."""
        self._commands.append(lambda: self._ended_by_peer(lease_id))
        self.wake()

    def _ended_by_peer(self, lease_id: str) -> None:
        self._free_lease(lease_id)

    # The rest.

    def _measure(self, took_s: float, tokens: int, runs: int) -> None:
        if tokens > runs:
            self._costs = replace(self._costs, prefill_s_per_token=took_s / tokens)
        else:
            self._costs = replace(self._costs, decode_step_s=took_s)

    def _tell(self) -> None:
        if self._claims.has_changed:
            change = self._claims.take()
            if change:
                self._on_change(change)

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done))


@dataclass(frozen=True, slots=True)
class _Lease:
    blocks: list[int]
    timer: asyncio.TimerHandle


def _is_late(run: Run) -> bool:
    return run.deadline is not None and is_late(run.deadline, unix_ms())
