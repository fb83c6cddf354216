"""The engine protocol: what a worker asks of the thing that computes tokens.

Implementations: `worker_runtime.vllm_engine.VllmEngine` for the service, `fault_sim.block_engine.BlockEngine` for the
fault simulator, and a deterministic fake for tests. All pass the contract tests in `tests/contract/`. What goes in and
what comes out are `cluster_core.engine_jobs`, what an engine says of itself `cluster_core.engine_reports`.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from cluster_core.engine_jobs import Adapter, EngineJob, EngineOutput, SessionMode, SessionProgress
from cluster_core.engine_reports import (
    DecodeBatch,
    EngineInfo,
    EngineStatus,
    HotPrefix,
    PrefixClaimChange,
    PrefixClaims,
)


class EngineSession(Protocol):
    """A job whose prompt is still arriving. The engine computes what it has meanwhile, and samples nothing.

    Input is taken in between two engine steps, in order; `progress().inputs` counts what has been.
    """

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds to the end of the prompt. Raises OutOfRangeError when it would not fit the model: nothing changes."""
        ...

    def update(self, token_ids: Sequence[int]) -> None:
        """Replaces the whole prompt; the KV of the longest common prefix is kept. Raises as `append` does."""
        ...

    def finish(self, token_ids: Sequence[int] = ()) -> AsyncIterator[EngineOutput]:
        """Completes the prompt with these last tokens and runs the job, as `Engine.generate` does.

        Raises InvalidInputError for an empty prompt, and as `append` does: nothing changes then.
        No input is taken after it.
        """
        ...

    def progress(self) -> SessionProgress: ...

    async def changed(self) -> SessionProgress:
        """Waits until `progress` differs from what this call returned last. Raises UnavailableError when the engine
        dies meanwhile or the session was closed."""
        ...

    def close(self) -> None:
        """Ends the session wherever it stands and frees what it holds. Harmless after its end."""
        ...


class Engine(Protocol):
    """One engine, driven from one asyncio loop."""

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        """Brings the engine up. `on_phase` hears what it is doing, `on_death` that it died later, from any thread."""
        ...

    def generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
        """Runs a job. Closing the iterator early aborts the job and frees its blocks.

        Raises InvalidInputError for what the engine refuses, UnavailableError when it dies meanwhile.
        """
        ...

    def open_session(self, job: EngineJob, mode: SessionMode) -> EngineSession:
        """Opens a session with the prompt as far as it is known, which may be empty.

        Raises InvalidInputError for what the engine refuses, NotSupportedError where it has no sessions.
        """
        ...

    async def hand_over(self, request_id: str) -> bool:
        """Ends a job as it stands, for another engine to go on with: its next output is its last, has no tokens, and
        carries the lease on the KV of all its tokens but the last. False where no job of that name generates here, or
        its KV cannot be leased: then nothing has changed."""
        ...

    async def release(self, lease_id: str) -> bool:
        """Frees the blocks of a lease that nobody will pull; False when there is no such lease any more."""
        ...

    def holding(self, adapter: Adapter | None) -> AbstractAsyncContextManager[str]:
        """Around the jobs of an adapter: it is loaded, if it is not, and stays so. Gives its digest; nothing for None.

        Raises AdapterNotLoadedError where the engine takes no adapters, this is none of its model's, the folder holds
        another one than the digest says, or all places are in use.
        """
        ...

    async def unload_adapter(self, digest: str) -> bool:
        """Gives its memory back. False where it is held, or not there."""
        ...

    def adapters(self) -> Sequence[str]:
        """Digests of those that are loaded."""
        ...

    def status(self) -> EngineStatus: ...

    async def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        """Cached prefixes, highest priority first. Waits for the engine to have a moment; empty without tiers."""
        ...

    async def decode_batch(self, at_most: int) -> DecodeBatch:
        """So many prefix groups and so many waiting requests at most. Waits for the engine to have a moment; empty
        where `status` has no decode report."""
        ...

    def follow_claims(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        """From now on `on_change` hears on the loop, in order, how the cached chunks change, and first which there are.

        There is one follower: a later call takes the place of an earlier one. May be called before `start`.
        """
        ...

    async def prefix_claims(self, on_look: Callable[[], None] = lambda: None) -> PrefixClaims:
        """The cached chunks as the engine's own block pools have them, looked up there and not among the changes.

        Waits for the engine to have a moment. `on_look` is called on the loop at the place of the look among the
        changes: behind all that came before it, ahead of all that came after it. Empty for a dead engine.
        """
        ...

    async def stop(self) -> None: ...
