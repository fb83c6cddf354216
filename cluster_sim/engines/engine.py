"""What a worker's engine is to the simulated cluster; the counterpart of `cluster_core.engine.Engine`.

An engine has no clock: each call brings the time. The cluster calls `add`, `landed`, `release`, `abort` when they
happen, and `advance` at the time of `next_s`; what comes of it are outcomes. After each call `next_s` may be another.

Who holds the KV blocks of a job:
    waiting                            nobody
    prefills, or pulls                 the engine, from admission on
    prefilled with `hand_off`          the engine, until `release`
    decodes                            the engine, until it has finished or is aborted
Blocks of a prefix that is known stay cached after that, until room is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from cluster_core.engine_jobs import SessionMode
from cluster_core.engine_reports import EngineCosts
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys


@dataclass(frozen=True, slots=True, eq=False)
class SimJob:
    """One prompt for one engine.

    number: unique in the simulation. keys: names of the prompt's full blocks, in order, each covering all before it
    (`prefix_chunks`). output_tokens: of the answer, from here on. hand_off: the prompt's blocks are kept until
    they are pulled. pulls: the prompt's KV is to be pulled, apart from what is cached here; the first token is known.
    """

    number: int
    prompt_tokens: int
    keys: Keys
    output_tokens: int
    hand_off: bool = False
    pulls: bool = False
    tenant: str = ""

    @property
    def own_tokens(self) -> int:
        """Tokens of the answer that are generated here."""
        return self.output_tokens - self.pulls


class OutcomeKind(Enum):
    """PULLS: the job has its blocks; `tokens` of KV are to be pulled, and `landed` is to be called then.
    FIRST_TOKEN: the first token that this engine has generated. FINISHED: the last one. REFUSED: it can never fit.
    """

    PULLS = "pulls"
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """tokens: of PULLS, KV to be pulled; of FIRST_TOKEN, prompt tokens that were computed here."""

    job: SimJob
    kind: OutcomeKind
    at_s: float
    tokens: int = 0


@dataclass(slots=True)
class EngineTotals:
    """Since the start. busy_s: of engine steps. Hits are prompt tokens found on the device and in host memory, of
    prompts that are computed here and not pulled. decode_tokens over decode_steps is the mean batch.
    invalidated_tokens: computed for a session that has replaced them."""

    busy_s: float = 0.0
    prefill_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    invalidated_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SimInput:
    """One input of a session, and what the prompt is after it.

    tokens: what it brings, as the scheduler takes it: appended, or with `replaces` all of the prompt. prompt_tokens:
    how long the prompt is then; kept_tokens: how much of what it was before still stands. keys: of its full blocks.
    is_last: the prompt is whole.
    """

    tokens: Sequence[int]
    prompt_tokens: int
    kept_tokens: int
    keys: Keys
    replaces: bool = False
    is_last: bool = False


class SimEngine(Protocol):
    """totals: kept up to date with each `advance`."""

    totals: EngineTotals

    def add(self, job: SimJob, now_s: float) -> None: ...

    def open(self, job: SimJob, first: SimInput, mode: SessionMode, now_s: float) -> None:
        """A session: the job's prompt as it will be, of which `first` is here now. Engines of prefill workers only."""
        ...

    def take_input(self, number: int, following: SimInput, now_s: float) -> None:
        """Of an open session; nothing happens where it is not known any more."""
        ...

    def landed(self, number: int, now_s: float) -> None:
        """The job's KV has been pulled."""
        ...

    def release(self, number: int, now_s: float) -> None:
        """Nobody pulls what a finished `hand_off` job has kept."""
        ...

    def abort(self, number: int, now_s: float) -> None:
        """The job, wherever it is; unknown numbers are ignored."""
        ...

    def next_s(self) -> float:
        """When `advance` is wanted; infinity while nothing can go on by itself."""
        ...

    def advance(self, now_s: float) -> Sequence[Outcome]:
        """All that has happened up to now."""
        ...

    def claim_changes(self) -> ClaimChange:
        """Cached blocks that have come or gone since the last call."""
        ...

    def slow_down(self, factor: float, now_s: float) -> None:
        """Steps that begin from now on take so many times as long as the cost model says."""
        ...

    def load(self) -> tuple[int, int]:
        """(free, all) device blocks."""
        ...

    def costs(self) -> EngineCosts:
        """As measured from its own steps."""
        ...

    def check_invariants(self) -> None:
        """Raises AssertionError when blocks are lost or owned twice."""
        ...
