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

from cluster_core.clock import ClusterClock, monotonic_s
from cluster_core.engine_jobs import (
    EngineJob,
    EngineOutput,
    FinishReason,
    HandoffOutcome,
    HandoffReport,
    KvLease,
    SessionMode,
)
from cluster_core.engine_reports import (
    DecodeBatch,
    EngineCosts,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    EngineStatus,
    HotPrefix,
    PrefixClaimChange,
    PrefixClaims,
)
from cluster_core.errors import InvalidInputError, UnavailableError
from fault_sim.block_content import BlockContent
from fault_sim.block_fabric import BlockEngineSettings, Fabric
from fault_sim.block_pool import BlockPool
from fault_sim.block_run import Run
from fault_sim.block_schedule import MOST_RUNNING, BlockSchedule
from fault_sim.block_session import BlockSession
from kv_transfer.claims.chunk_claims import ChunkClaims
from kv_transfer.claims.prefix_chunks import root_key
from kv_transfer.handoff.lease_params import decode_params, encode_params
from kv_transfer.handoff.rules import Pull, effective_deadline_s, is_late, stamp_deadline

_KV_BYTES_PER_TOKEN = 64


class BlockEngine:
    """See `cluster_core.engine.Engine`. slow: factor on what steps take. engine_id: unique in the fabric. clock: what
    deadlines of pulls are told in.
    """

    def __init__(
        self,
        host: str,
        engine_id: str,
        fabric: Fabric,
        settings: BlockEngineSettings,
        clock: ClusterClock | None = None,
    ) -> None:
        self.host = host
        self._clock = clock or ClusterClock()
        self.slow = 1.0
        self.settings = settings
        self.pool = BlockPool(settings.blocks, settings.block_tokens)
        self._id = engine_id
        self._fabric = fabric
        fabric.engines[engine_id] = self
        self._claims = ChunkClaims(
            lambda salt, adapter: root_key(settings.service_id, salt, adapter),
            settings.block_tokens,
            -(-settings.chunk_tokens // settings.block_tokens),
        )
        self._on_change: Callable[[PrefixClaimChange], None] = lambda change: None
        self.content = BlockContent(self.pool, self._claims)
        self._schedule = BlockSchedule(self.content)
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
            "blocks", "bytes", 256, settings.max_model_len, settings.block_tokens, MOST_RUNNING, "float32"
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
            running_requests=len(self._schedule.running),
            waiting_requests=len(self._schedule.waiting),
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
            return self.content.audit()

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
        held = [run.blocks for run in {*self._schedule.running, *self._schedule.waiting, *self._names.values()}]
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

    # Its steps.

    async def _work(self) -> None:
        while True:
            self._between_two_steps()
            step = self._schedule.step()
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
            if run.session is not None and run.session.take_in():
                self._schedule.has_input(run)
        if self._dead is None:
            self._schedule.admit(self._begun, self._drop_late_pull)
        self._tell()

    def _begun(self, run: Run) -> None:
        if run.pulls:
            run.pulls = False
            self._pull(run)

    def _compute(self, run: Run, count: int) -> None:
        """With the last of its tokens comes the next one."""
        self.content.compute(run, count)
        if run.session is not None and run.computed <= run.prompt_tokens:
            run.session.computed(count)
        if run.computed == len(run.tokens) and not run.is_open and not run.abandoned:
            self._generate(run)

    def _generate(self, run: Run) -> None:
        output = run.generated(self.content.next_token(run))
        self._counters.generated_tokens += len(output.token_ids)
        reason = output.finish_reason
        if reason is not None:
            if run.session is not None:
                output = replace(output, session=run.session.record())
            output = replace(output, lease=self._end(run, reason))
        run.outputs.put_nowait(output)

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
            stamped, now = job.pull.deadline_unix_ms, self._clock.unix_ms()
            run.pull_until_s = effective_deadline_s(stamped, now, monotonic_s(), self.settings.deadline_s)
        self._names[job.request_id] = run
        self._counters.requests += 1
        self._counters.prompt_tokens += len(job.token_ids)
        self._commands.append(lambda: self._enter(run))
        self.wake()
        return run

    def _enter(self, run: Run) -> None:
        if not run.abandoned:
            self._schedule.waiting.append(run)

    def _end(self, run: Run, reason: FinishReason) -> KvLease | None:
        """Its answer is complete; its blocks go, or are leased."""
        self._schedule.remove(run)
        self._names.pop(run.job.request_id, None)
        self._counters.cacheable_requests += run.has_published
        if not run.job.hand_off or reason is not FinishReason.LENGTH:
            self.content.give_back(run)
            return None
        lease_id, blocks = run.job.request_id, run.blocks
        run.blocks = []
        timer = asyncio.get_running_loop().call_later(self.settings.lease_s, self._expire, lease_id)
        self._leases[lease_id] = _Lease(blocks, timer)
        self._counters.handoffs_leased += 1
        params = encode_params({"engine": self._id, "blocks": blocks, "tokens": run.prompt_tokens})
        return KvLease(lease_id, params, stamp_deadline(self._clock.unix_ms(), self.settings.deadline_s))

    def _abort(self, run: Run) -> None:
        if self._names.get(run.job.request_id) is run:
            del self._names[run.job.request_id]
        if run.pulls:
            run.pulls = False
            self._tell_peer(run)
        if not run.pulling:
            self._schedule.remove(run)
            self.content.give_back(run)

    def _fail(self, run: Run, error: Exception) -> None:
        run.outputs.put_nowait(error)
        if run.session is not None:
            run.session.fail(error)
        self.leave(run)

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

    def _drop_late_pull(self, run: Run) -> None:
        """Its lease must not be pulled any more: it computes the prompt itself."""
        if run.pulls and _is_late(run):
            run.pulls = False
            run.report = HandoffReport(HandoffOutcome.RECOMPUTED)
            self._counters.handoffs_recomputed += 1

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
        work_s = self.settings.pull_s + self.settings.pull_token_s * tokens
        content = await self._fabric.read(
            self.host, params["engine"], params["blocks"][first:], work_s, lambda: _is_late(run)
        )
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
        lease = run.job.pull
        if lease is not None and self._dead is None:
            engine_id = decode_params(lease.connector_params)["engine"]
            self._in_background(self._fabric.tell_pulled(self.host, engine_id, lease.lease_id))

    def pulled(self, lease_id: str) -> None:
        """A peer has what it wanted of a lease."""
        self._commands.append(lambda: self._drop_pulled(lease_id))
        self.wake()

    def _drop_pulled(self, lease_id: str) -> None:
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
    return run.pull_until_s is not None and is_late(run.pull_until_s, monotonic_s())
