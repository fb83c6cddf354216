"""All that one engine works with once it is up: its jobs, its claims and its figures, put together for each step.

Everything here runs on the engine's thread, between two steps. What changes things of the asyncio loop goes through
`on_loop`, which has the loop call a function soon: `call_soon_threadsafe`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cluster_core.clock import ClusterClock, monotonic_s
from cluster_core.engine_jobs import Adapter, EngineOutput
from cluster_core.engine_reports import DecodeBatch, EngineInfo, HotPrefix, PrefixClaims
from cluster_core.errors import RachisError
from kv_transfer import vllm_private
from kv_transfer.between_steps import NAP_S
from worker_runtime.engine_claims import EngineClaims
from worker_runtime.engine_figures import EngineFigures
from worker_runtime.engine_settings import EngineSettings
from worker_runtime.job_stream import JobStream
from worker_runtime.running_jobs import RunningJobs


class EngineWork:
    """engine: vLLM's own, in this process."""

    def __init__(
        self,
        engine: Any,
        info: EngineInfo,
        settings: EngineSettings,
        clock: ClusterClock,
        on_loop: Callable[..., object],
    ) -> None:
        self.engine = engine
        self.info = info
        self.figures = EngineFigures(engine, info, settings)
        self.claims = EngineClaims(engine, info.block_size_tokens, settings, on_loop)
        self.jobs = RunningJobs(engine, settings, clock, self.figures, on_loop)
        self._scheduler = vllm_private.scheduler_of(engine)
        self._on_loop = on_loop

    def has_requests(self) -> bool:
        """Leases and blocks on their way among them."""
        return bool(self._scheduler.has_requests())

    def nap_s(self) -> float:
        """How long it has nothing to compute, unless a command comes."""
        held_nap_s: float = getattr(self._scheduler, "held_nap_s", 0.0)
        return held_nap_s or (0.0 if self._scheduler.running else NAP_S)

    def copying_since_s(self) -> float | None:
        """Since when a copy between device and host memory beside steps is due; None where there is none."""
        return getattr(self._scheduler, "copying_since_s", None)

    def step(self) -> None:
        began_s = monotonic_s()
        made = self.jobs.step(counts_prefixes=self.claims.group >= 0)
        self.figures.count_step(monotonic_s() - began_s)
        self.claims.report_changes()
        self.jobs.report_progress()
        # Before the outputs: a caller that has a lease finds it in the status.
        self.publish_status()
        if made:
            self._on_loop(_deliver, made)

    def publish_status(self) -> None:
        leased = vllm_private.leased_request_ids(self.engine)
        self.jobs.keep_leases(leased)
        self.figures.publish(len(leased), self.claims.stored_blocks)

    def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        """Empty for a dead engine, as the two below are."""
        return self.figures.hottest_prefixes(at_most) if self.jobs.dead is None else ()

    def decode_batch(self, at_most: int) -> DecodeBatch:
        batch = vllm_private.decode_batch_of(self.engine, at_most) if self.jobs.dead is None else None
        return batch if batch is not None else DecodeBatch()

    def load_adapter(self, adapter: Adapter) -> RachisError | None:
        """Why it cannot be."""
        try:
            self.jobs.load_adapter(adapter)
        except RachisError as error:
            return error
        return None

    def audited_claims(self) -> PrefixClaims:
        return self.claims.audited() if self.jobs.dead is None else PrefixClaims()

    def die(self, why: str) -> None:
        """The engine takes no step any more."""
        self.jobs.die(why)

    def shut_down(self) -> None:
        self.engine.engine_core.shutdown()


def _deliver(made: Sequence[tuple[JobStream, EngineOutput | Exception]]) -> None:
    for stream, item in made:
        stream.items.put_nowait(item)
