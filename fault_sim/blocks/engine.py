"""An engine whose KV blocks have content: a token is right only when the blocks held what they should.

It steps in the loop's time, as vLLM does: between two steps it carries out its commands, then each running request
gets tokens of the step's budget. Blocks run out: then the last request that came is preempted and computed again.

Who holds the blocks of a request:
    waits, or was preempted          nobody; the cache as far as it lasts
    is being pulled to               its run, which does not use them before the pull has ended, aborted or not; from
                                     the deadline on the quarantine, until the transfer is over
    runs                             its run
    finished, leased                 the lease, until it is pulled, released, or `lease_s` old
    handed over                      likewise
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from cluster_core.clock import ClusterClock
from cluster_core.engine_jobs import Adapter, EngineJob, EngineOutput, FinishReason, KvLease, SessionMode
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
from cluster_core.heartbeat import Heartbeat
from fault_sim.blocks.adapters import BlockAdapters
from fault_sim.blocks.commands import Commands
from fault_sim.blocks.content import BlockContent
from fault_sim.blocks.fabric import BlockEngineSettings, Fabric
from fault_sim.blocks.gate import Gate
from fault_sim.blocks.leases import Leases
from fault_sim.blocks.pool import BlockPool
from fault_sim.blocks.pulls import Pulls
from fault_sim.blocks.run import Run
from fault_sim.blocks.schedule import MOST_RUNNING, BlockSchedule
from fault_sim.blocks.session import BlockSession
from kv_transfer.claims.chunk_claims import ChunkClaims
from kv_transfer.claims.prefix_chunks import root_key

# Tokens are characters of one byte.
VOCABULARY = 256


class BlockEngine:
    """See `cluster_core.engine.Engine`. engine_id: unique in the fabric. clock: that of its host, for deadlines."""

    def __init__(
        self,
        host: str,
        engine_id: str,
        fabric: Fabric,
        settings: BlockEngineSettings,
        clock: ClusterClock | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.host = host
        # How many times as long steps take as the settings say.
        self.slow = 1.0
        # Set while steps end; `hang` clears it.
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._heartbeat = Heartbeat()
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
        self._gate = gate or Gate()
        self._schedule = BlockSchedule(self.content, self._gate)
        self._names: dict[str, Run] = {}
        self._commands = Commands()
        self._counters = EngineCounters()
        clock = clock or ClusterClock()
        self._leases = Leases(engine_id, settings, clock, self.pool, self._commands, self._counters)
        self._pulls = Pulls(
            host, fabric, settings, clock, self.content, self._commands, self._counters, on_abandoned=self._abort
        )
        self._stepping: asyncio.Task[None] | None = None
        self._costs = EngineCosts()
        self._dead: str | None = None
        self._adapters = BlockAdapters(settings.max_adapters, fabric)

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        on_phase("serving")
        self._begin_stepping()
        its = self.settings
        lengths = its.max_model_len, its.block_tokens, MOST_RUNNING
        return EngineInfo("blocks", "bytes", VOCABULARY, *lengths, "float32", its.max_adapters)

    async def generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
        run = self._admit(job)
        self._fabric.on_asked(self.host, job)
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

    async def hand_over(self, request_id: str) -> bool:
        return bool(await self._between_steps(lambda: self._hand_over(request_id)))

    async def release(self, lease_id: str) -> bool:
        return bool(await self._between_steps(lambda: self._release(lease_id)))

    def holding(self, adapter: Adapter | None) -> AbstractAsyncContextManager[str]:
        return self._adapters.holding(adapter)

    async def unload_adapter(self, digest: str) -> bool:
        return await self._adapters.unload(digest)

    def adapters(self) -> Sequence[str]:
        return self._adapters.digests

    def status(self) -> EngineStatus:
        sessions = sum(run.is_open for run in self._names.values())
        load = EngineLoad(
            running_requests=len(self._schedule.running),
            waiting_requests=len(self._schedule.waiting),
            leased_handoffs=len(self._leases),
            free_blocks=self.pool.free,
            total_blocks=self.pool.total,
            open_sessions=sessions,
            stalled_s=self._heartbeat.stalled_s,
            quarantined_blocks=len(self._pulls.quarantine),
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
        tasks = [*([self._stepping] if self._stepping is not None else ()), *self._pulls.tasks]
        self.die("stopped")
        if tasks:
            await asyncio.wait(tasks)

    def die(self, why: str) -> None:
        """At once: callers that wait for it get an error, and peers cannot read its memory any more."""
        if self._dead is not None:
            return
        self._dead = why
        if self._fabric.engines.get(self._id) is self:
            del self._fabric.engines[self._id]
        if self._stepping is not None:
            self._stepping.cancel()
        self._pulls.stop()
        for run in list(self._names.values()):
            self._fail(run, UnavailableError(f"the engine died: {why}"))
        self._between_two_steps()

    def hang(self) -> None:
        """Its step does not end, until `go_on`."""
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def live_jobs(self) -> list[str]:
        """Names of the jobs whose callers wait for them."""
        return [name for name, run in self._names.items() if not run.abandoned]

    def check_invariants(self) -> None:
        held = [run.blocks for run in {*self._schedule.running, *self._schedule.waiting, *self._names.values()}]
        self.pool.check_invariants([*held, *self._leases.blocks(), self._pulls.quarantine.blocks])

    # For its sessions.

    def longest_prompt(self, job: EngineJob) -> int:
        settings = self.settings
        room = min(settings.max_model_len, settings.blocks * settings.block_tokens)
        return room - job.sampling.max_tokens

    def wake(self) -> None:
        self._commands.wake()

    def leave(self, run: Run) -> None:
        """Its caller has gone; it is aborted where it has not ended."""
        run.abandoned = True
        self._commands.add(lambda: self._abort(run))
        if self._dead is not None:
            self._between_two_steps()

    async def outputs(self, run: Run) -> AsyncIterator[EngineOutput]:
        while True:
            item = await run.outputs.get()
            if isinstance(item, Exception):
                raise item
            run.taken = item.is_last
            yield item
            if run.taken:
                return

    # Its steps.

    def _begin_stepping(self) -> None:
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while True:
            self._between_two_steps()
            step = self._schedule.step()
            if not step:
                await self._commands.news()
                continue
            tokens = sum(step.values())
            took_s = (self.settings.step_s + self.settings.token_s * tokens) * self.slow
            with self._heartbeat.step():
                await asyncio.sleep(took_s)
                await self._goes_on.wait()
            if self._is_poisoned(step):
                return
            for run, count in step.items():
                # Input that has come for the run meanwhile waits for the end of the step.
                self._compute(run, count)
            self._measure(took_s, tokens, len(step))
            self._publish_claims()

    def _is_poisoned(self, step: Iterable[Run]) -> bool:
        """Whether the engine dies of a run of this step."""
        for run in step:
            if tuple(run.tokens[: run.prompt_tokens]) in self._fabric.poison:
                self._fabric.on_poisoned(self.host, run.job)
                self.die("killed by what it computed")
                return True
        return False

    def _between_two_steps(self) -> None:
        self._commands.carry_out()
        for run in list(self._names.values()):
            if run.session is not None and self._gate.takes_input(run) and run.session.take_in():
                self._schedule.has_input(run)
        if self._dead is None:
            self._schedule.admit(self._pulls.begin, self._pulls.drop_late)
        self._publish_claims()

    def _compute(self, run: Run, count: int) -> None:
        """With the last of its tokens comes the next one."""
        self.content.compute(run, count)
        if run.session is not None and run.computed <= run.prompt_tokens:
            run.session.computed(count)
        if run.computed == len(run.tokens) and not run.is_open and not run.abandoned:
            self._generate(run)

    def _generate(self, run: Run) -> None:
        output = run.generated(self.content.next_token(run))
        run.draws += 1
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
        emitted = job.emitted.token_ids if job.emitted is not None else ()
        if job.request_id in self._names or job.request_id in self._leases:
            raise InvalidInputError("is already running", field="request_id")
        if not (job.token_ids or may_be_empty) or len(job.token_ids) > self.longest_prompt(job):
            raise InvalidInputError(f"the prompt has {len(job.token_ids)} tokens", field="request")
        if emitted and len(emitted) >= min(job.sampling.max_tokens, self.settings.max_model_len - len(job.token_ids)):
            raise InvalidInputError(f"has {len(emitted)} tokens", field="emitted")
        assert job.adapter is None or job.adapter.digest in self._adapters.digests, "it is held"
        if max(emitted, default=0) >= VOCABULARY:
            raise InvalidInputError(f"has token {max(emitted)}", field="emitted")
        run = Run(job, [*job.token_ids, *emitted], len(job.token_ids))
        run.draws = len(emitted)
        run.text, run.shown = "".join(map(chr, emitted)), job.emitted.sent_chars if job.emitted is not None else 0
        if job.pull is not None:
            self._pulls.want(run)
        self._names[job.request_id] = run
        self._counters.requests += 1
        self._counters.prompt_tokens += len(job.token_ids)
        self._commands.add(lambda: self._enter(run))
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
        return self._leases.grant(run)

    def _hand_over(self, name: str) -> bool:
        run = self._names.get(name)
        if run is None or not self._schedule.decodes(run):
            return False
        self._schedule.remove(run)
        del self._names[name]
        run.outputs.put_nowait(EngineOutput((), "", lease=self._leases.grant(run)))
        return True

    def _abort(self, run: Run) -> None:
        if self._names.get(run.job.request_id) is run:
            del self._names[run.job.request_id]
        elif not run.taken:
            # It had just ended: nobody knows of its lease.
            self._counters.handoffs_released += self._leases.free(run.job.request_id)
        self._pulls.give_up(run)
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
        released = self._leases.free(name)
        self._counters.handoffs_released += released
        return released

    async def _between_steps(self, command: Callable[[], Any]) -> Any:
        """What the command returns, once the engine has had a moment."""
        if self._dead is not None:
            return command()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def carry_out() -> None:
            result = command()
            if not answer.done():
                answer.set_result(result)

        self._commands.add(carry_out)
        return await answer

    def pulled(self, lease_id: str) -> None:
        """A peer has what it wanted of a lease."""
        self._commands.add(lambda: self._leases.free(lease_id))

    # The rest.

    def _measure(self, took_s: float, tokens: int, runs: int) -> None:
        if tokens > runs:
            self._costs = replace(self._costs, prefill_s_per_token=took_s / tokens)
        else:
            self._costs = replace(self._costs, decode_step_s=took_s)

    def _publish_claims(self) -> None:
        if self._claims.has_changed:
            change = self._claims.take()
            if change:
                self._on_change(change)
