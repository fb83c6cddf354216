"""In which order sessions and requests are computed: one pure function for each policy.

Source: Stream2LLM (arXiv:2604.16395), section 4.4; `default` is ours. A policy takes everything unfinished (running,
preempted, waiting and parked alike) and returns all of it, first the one to compute first. What is preempted follows
from the same order, read from its end (`planning.victims`). `by_priority` puts what clients have said of their requests
above that.

Ties: `mcps` by arrival; what is still equal keeps the order given. The scheduler gives its requests in the order in
which they were added, so the same state always gives the same order. Nothing is changed.

Ordering 500 contenders costs a fraction of a short engine step because no key is a tuple: tiers are lists, each sorted
by one number. `rachis bench ordering` measures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter

from cluster_core.engine_jobs import NOBODY, TenantShare


class Tenure(IntEnum):
    """Where the engine's own queues hold a contender, in the order in which vLLM serves them."""

    RUNNING = 0
    PREEMPTED = 1
    WAITING = 2


@dataclass(slots=True, eq=False)
class Contender:
    """One unfinished request or session, as it stood when the step was planned."""

    request_id: str
    # No input will come any more.
    complete: bool
    arrival_s: float
    # When its last input came.
    last_chunk_s: float
    # Since when it has had tokens to compute and got none; infinite while it is being served or has nothing to compute.
    # Once overdue it stays so until the contender has caught up.
    waiting_since_s: float
    # Tokens whose KV exists, on the device or in host memory.
    computed_tokens: int
    tenure: Tenure
    # Its place among those of its tenure in the engine's own order.
    queue_index: int

    # What could be computed now.
    remaining_tokens: int = 0

    # For planning alone.

    # The prompt as far as it is known.
    known_tokens: int = 0
    # The device blocks it has.
    held_blocks: int = 0
    # Its blocks can be taken from it before the next step.
    evictable: bool = True
    # How many blocks in front of its prompt others hold as well.
    shared_blocks: int = 0
    # The number of the first of those, which all that share it have in common.
    first_block: int = -1
    # How many blocks in front of its prompt stay where they are whatever is planned: a lease holds them too, or a load.
    leased_blocks: int = 0
    # Its LoRA adapter, by vLLM's number; 0: none.
    adapter: int = 0
    # The lowest is computed first, whatever the policy says of the others.
    priority: int = 0
    # Whose it is.
    tenant: TenantShare = NOBODY

    # It has begun to answer: it is no prompt beside which others wait.
    decodes: bool = False

    # What could be computed now, less what its wait is worth since its prompt has been whole.
    left_tokens: float = 0.0

    # How likely the first of these stays in the final prompt; 1 where nothing is replaced, and for an overdue one.
    survival: float = 1.0


Policy = Callable[[Sequence[Contender], float], list[Contender]]

_arrival = attrgetter("arrival_s")
_last_chunk = attrgetter("last_chunk_s")
_waiting_since = attrgetter("waiting_since_s")
_left = attrgetter("left_tokens")
_survival = attrgetter("survival")
_computed = attrgetter("computed_tokens")
_queue_index = attrgetter("queue_index")
_priority = attrgetter("priority")


def by_priority(ordered: list[Contender]) -> list[Contender]:
    """What a policy has ordered, the lowest priority number first."""
    if any(each.priority for each in ordered):
        ordered.sort(key=_priority)
    return ordered


def default_vllm(contenders: Sequence[Contender], now_s: float) -> list[Contender]:
    """What stock vLLM does: the running ones in their order, then the preempted, then the waiting ones (4.4.1)."""
    queues: tuple[list[Contender], ...] = tuple([] for _ in Tenure)
    for each in contenders:
        queues[each.tenure].append(each)
    return [each for queue in queues for each in sorted(queue, key=_queue_index)]


def default(contenders: Sequence[Contender], now_s: float) -> list[Contender]:
    """Complete before partial: of those first who has least left to compute, less what its wait has earned; of these
    what is likeliest to stay, then by arrival.

    Shortest first keeps most waits short, and beyond what the engine carries it would keep long prompts out for ever.
    By what a wait earns (`step_speed`), half of what the engine computes meanwhile, a prompt goes before all that come
    once it has waited twice as long as it takes alone. Not among the published orders.
    """
    complete: list[Contender] = []
    partial: list[Contender] = []
    for each in contenders:
        (complete if each.complete else partial).append(each)
    partial.sort(key=_arrival)
    partial.sort(key=_survival, reverse=True)
    return sorted(complete, key=_left) + partial


def fcfs(contenders: Sequence[Contender], now_s: float) -> list[Contender]:
    """Complete before partial, each by arrival (4.4.2)."""
    complete = [each for each in contenders if each.complete]
    partial = [each for each in contenders if not each.complete]
    return sorted(complete, key=_arrival) + sorted(partial, key=_arrival)


def mcps(contenders: Sequence[Contender], now_s: float) -> list[Contender]:
    """Most chunks processed: the most computed tokens come first (4.4.3)."""
    ordered = sorted(contenders, key=_arrival)
    ordered.sort(key=_computed, reverse=True)
    return ordered


def lcas(starvation_s: float) -> Policy:
    """Last chunk arrival: complete before partial, each by most recent input first (4.4.4), with a bound on waiting.

    The paper names the weakness: a session that rarely gets input may wait for ever. Here one that has waited
    `starvation_s` comes before all others, longest wait first, complete or not. The bound is a step because no slope is
    one: with a priority of recency + w * waiting time, a request that waits since its last input at t has t + w * (now
    - t). For w > 1 the oldest t always wins, which is first come, first served; for w < 1 the newest does, however long
    the others have waited.
    """

    def policy(contenders: Sequence[Contender], now_s: float) -> list[Contender]:
        overdue_since_s = now_s - starvation_s
        overdue: list[Contender] = []
        complete: list[Contender] = []
        partial: list[Contender] = []
        for each in contenders:
            if each.waiting_since_s <= overdue_since_s:
                overdue.append(each)
            elif each.complete:
                complete.append(each)
            else:
                partial.append(each)
        overdue.sort(key=_waiting_since)
        complete.sort(key=_last_chunk, reverse=True)
        partial.sort(key=_last_chunk, reverse=True)
        return overdue + complete + partial

    return policy


POLICIES: Mapping[str, Callable[[float], Policy]] = {
    "default": lambda starvation_s: default,
    "default_vllm": lambda starvation_s: default_vllm,
    "fcfs": lambda starvation_s: fcfs,
    "mcps": lambda starvation_s: mcps,
    "lcas": lcas,
}


# With these, sessions that still take input are computed only while no whole prompt is, and little at a time.
BOUND_PARTIAL = frozenset({"default"})


def make_policy(name: str, starvation_s: float) -> Policy:
    """The policy of that name; KeyError for any but those of `POLICIES`, which the configuration admits."""
    return POLICIES[name](starvation_s)
