"""What is asked of an engine by those who are not on its thread, and where it may run.

Commands change a job and have no answer; questions have one. Both are carried out on the engine's thread between two
steps, in the order in which they were given, and are named here: an engine may run in this process
(`worker_runtime.engine_thread`) or in one of its own (`worker_runtime.engine_process`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cluster_core.engine_reports import DecodeBatch, EngineInfo, EngineStatus, PrefixClaimChange, PrefixClaims
from cluster_core.errors import UnavailableError
from worker_runtime.job_stream import JobStream
from worker_runtime.running_jobs import RunningJobs

# Of a job: the stream and what else it is called with.
JOB_COMMANDS: dict[str, Callable[..., None]] = {
    "add": RunningJobs.add,
    "open": RunningJobs.open,
    "extend": lambda jobs, stream, token_ids: jobs.take_in(stream, token_ids, replaces=False),
    "replace": lambda jobs, stream, token_ids: jobs.take_in(stream, token_ids, replaces=True),
    "close_input": RunningJobs.close_input,
    "abandon": RunningJobs.abandon,
}


@dataclass(frozen=True, slots=True)
class Question:
    """dead: the answer of an engine that cannot be asked any more, by why."""

    ask: Callable[..., Any]
    dead: Callable[[str], Any]


QUESTIONS: dict[str, Question] = {
    "hand_over": Question(lambda work, request_id: work.jobs.hand_over(request_id), lambda why: False),
    "release": Question(lambda work, lease_id: work.jobs.release(lease_id), lambda why: False),
    "load_adapter": Question(
        lambda work, adapter: work.load_adapter(adapter), lambda why: UnavailableError(f"the engine died: {why}")
    ),
    "unload_adapter": Question(lambda work, digest: work.jobs.unload_adapter(digest), lambda why: None),
    "hottest_prefixes": Question(lambda work, at_most: work.hottest_prefixes(at_most), lambda why: ()),
    "decode_batch": Question(lambda work, at_most: work.decode_batch(at_most), lambda why: DecodeBatch()),
    "audited_claims": Question(lambda work: work.audited_claims(), lambda why: PrefixClaims()),
}


class EngineCoreClient(Protocol):
    """The way to what steps (vLLM's word): a thread of this process, or another process. Driven from one asyncio loop;
    `start` once, `stop` once."""

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        """See `Engine.start`. Raises StartError where the engine does not come up."""
        ...

    def tell(self, command: str, stream: JobStream, *arguments: Any) -> None:
        """One of `JOB_COMMANDS`. May be called before `start`, as all of these may."""
        ...

    async def ask(
        self,
        question: str,
        *arguments: Any,
        unless_left: bool = False,
        on_place: Callable[[], None] = lambda: None,
    ) -> Any:
        """One of `QUESTIONS`. unless_left: it is not asked where the caller has left meanwhile. on_place: called on the
        loop at the question's place among the changes of claims."""
        ...

    def order(self, question: str, *arguments: Any) -> None:
        """One of `QUESTIONS` whose answer is nobody's."""
        ...

    def follow(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        """See `Engine.follow_claims`."""
        ...

    def status(self) -> EngineStatus:
        """Of when the last step had ended, but for how long the one that runs now hangs."""
        ...

    async def stop(self) -> None: ...
