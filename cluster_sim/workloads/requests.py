"""A request of a simulated run: its tokens, the names of its blocks, and what comes of a session when."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cluster_core.engine_jobs import SessionMode
from cluster_sim.engines.engine import SimInput
from kv_transfer.claims.prefix_chunks import Keys

# Under it the simulated service names prefixes.
SERVICE = "simulated"
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """keys: names of the prompt's full blocks, each covering all before it.

    inputs: of a session, the seconds after its arrival and what comes then, the first at once; prompt and keys are
    those after the last. mode: whether its prompt is replaced as well.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    keys: Keys
    tenant: str = ""
    inputs: tuple[tuple[float, SimInput], ...] = ()
    mode: SessionMode = SessionMode.APPEND

    @property
    def complete_s(self) -> float:
        """When its prompt is whole."""
        return self.arrival_s + (self.inputs[-1][0] if self.inputs else 0.0)


@dataclass(frozen=True, slots=True)
class Workload:
    """requests: by arrival, the same in each iteration."""

    block_tokens: int
    requests: Callable[[], Iterator[SimRequest]]

    def __iter__(self) -> Iterator[SimRequest]:
        return self.requests()


def block_names(blocks: Keys) -> Keys:
    """Blocks are numbered, keys look like hashes: a bijection that mixes (splitmix64); 0 names nothing."""
    mixed = blocks + _MIX
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _FACTORS[1]
    mixed ^= mixed >> np.uint64(31)
    mixed[mixed == 0] = 1
    return mixed
