"""The pulls of one engine: it reads the leased blocks of peers, or computes the prompt where that cannot be in time.

A pull reads blocks by number whatever they hold by then, and writes whenever it comes to that, as RDMA does: what keeps
it right are leases, deadlines, and the quarantine of what a pull may still write into that was given up.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cluster_core.clock import ClusterClock, monotonic_s
from cluster_core.engine_jobs import HandoffOutcome, HandoffReport
from cluster_core.engine_reports import EngineCounters
from fault_sim.blocks.commands import Commands
from fault_sim.blocks.content import BlockContent
from fault_sim.blocks.fabric import BlockEngineSettings, Fabric
from fault_sim.blocks.run import Run
from kv_transfer.handoff.lease_params import decode_params
from kv_transfer.handoff.overdue_pulls import PullReport, Quarantine
from kv_transfer.handoff.rules import Pull, effective_deadline_s, is_late

T = TypeVar("T")
KV_BYTES_PER_TOKEN = 64


class Pulls:
    """on_abandoned: gets a run whose pull has ended after its caller had gone."""

    def __init__(
        self,
        host: str,
        fabric: Fabric,
        settings: BlockEngineSettings,
        clock: ClusterClock,
        content: BlockContent,
        commands: Commands,
        counters: EngineCounters,
        on_abandoned: Callable[[Run], None],
    ) -> None:
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.quarantine = Quarantine(content.pool)
        self._host = host
        self._fabric = fabric
        self._settings = settings
        self._clock = clock
        self._content = content
        self._commands = commands
        self._counters = counters
        self._on_abandoned = on_abandoned
        self._is_stopped = False

    def want(self, run: Run) -> None:
        """A run that comes with a lease to pull."""
        assert run.job.pull is not None
        run.pulls = True
        stamped, now = run.job.pull.deadline_unix_ms, self._clock.unix_ms()
        run.pull_until_s = effective_deadline_s(stamped, now, monotonic_s(), self._settings.deadline_s)

    def drop_late(self, run: Run) -> None:
        """Its lease must not be pulled any more: it computes the prompt itself."""
        if run.pulls and _is_late(run):
            run.pulls = False
            run.report = HandoffReport(HandoffOutcome.RECOMPUTED)
            self._counters.handoffs_recomputed += 1

    def begin(self, run: Run) -> None:
        """The run has the blocks that are cached, and there is room for the others."""
        if not run.pulls:
            return
        run.pulls = False
        missing = len(run.tokens) - 1 - run.computed
        if missing <= 0:
            run.report = HandoffReport(HandoffOutcome.LOCAL)
            self._tell_peer(run)
            return
        pool = self._content.pool
        for _ in range(-(-len(run.tokens) // self._settings.block_tokens) - len(run.blocks)):
            block = pool.allocate()
            assert block is not None, "there was room"
            run.blocks.append(block)
        run.pulling = True
        self._in_background(self._transfer(run, missing))

    def give_up(self, run: Run) -> None:
        """It is aborted before its pull has begun."""
        if run.pulls:
            run.pulls = False
            self._tell_peer(run)

    def stop(self) -> None:
        self._is_stopped = True
        for task in self.tasks:
            task.cancel()

    async def _transfer(self, run: Run, tokens: int) -> None:
        """Reads the blocks as they are when it ends."""
        assert run.job.pull is not None
        settings = self._settings
        params = decode_params(run.job.pull.connector_params)
        first = run.computed // settings.block_tokens
        blocks = run.blocks[first:]
        pull = Pull(monotonic_s(), tokens, tokens * KV_BYTES_PER_TOKEN)
        work_s = settings.pull_s + settings.pull_token_s * tokens
        reading = self._in_background(self._fabric.read(self._host, params["engine"], params["blocks"][first:], work_s))
        left_s = None if run.pull_until_s is None else max(0.0, run.pull_until_s - monotonic_s())
        await asyncio.wait({reading}, timeout=left_s)
        if not reading.done() and _is_late(run):
            self._commands.add(lambda: self._given_up(run, blocks))
        content = await reading
        pull.ended_s = monotonic_s()
        pull.failed = not content or _is_late(run)
        self._commands.add(lambda: self._ended(run, pull, blocks, content))

    def _given_up(self, run: Run, blocks: list[int]) -> None:
        """At its deadline: the run computes its prompt in blocks that the pull cannot write into any more."""
        name = run.job.request_id
        self.quarantine.take_in(PullReport(given_up=Counter([name])), lambda _: blocks)
        run.pulling = False
        self._counters.handoffs_recomputed += 1
        if run.abandoned:
            self._on_abandoned(run)
            return
        run.report = HandoffReport(HandoffOutcome.RECOMPUTED)
        del run.blocks[len(run.blocks) - len(blocks) :]
        self._content.pool.drop(blocks)

    def _ended(self, run: Run, pull: Pull, blocks: list[int], content: list[list[bytes]]) -> None:
        for block, kv in zip(blocks, content, strict=False):
            self._content.pool.kv[block][:] = kv
        if not run.pulling:
            self.quarantine.take_in(PullReport(over=Counter([run.job.request_id])), lambda _: ())
            return
        run.pulling = False
        if not pull.failed:
            self._tell_peer(run)
            self._counters.handoffs_pulled += 1
            self._counters.kv_bytes_pulled += pull.kv_bytes
        else:
            self._counters.handoffs_recomputed += 1
        if run.abandoned:
            self._on_abandoned(run)
            return
        run.report = pull.report()
        if not pull.failed:
            run.computed = len(run.tokens) - 1

    def _tell_peer(self, run: Run) -> None:
        """The lease is not needed any more."""
        lease = run.job.pull
        if lease is not None and not self._is_stopped:
            engine_id = decode_params(lease.connector_params)["engine"]
            self._in_background(self._fabric.tell_pulled(self._host, engine_id, lease.lease_id))

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done))
        return task


def _is_late(run: Run) -> bool:
    return run.pull_until_s is not None and is_late(run.pull_until_s, monotonic_s())
