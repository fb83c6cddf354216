"""Who is computed in a step, and who may lose blocks for it: both phases' decisions, pure.

Source: Stream2LLM (arXiv:2604.16395), section 4.1, as corrected in the project's notes:

- Phase 1 charges the whole pool that candidates can hold, not the blocks that are free: what a lower priority holds
  can be taken in Phase 2. It changes nothing. What does not fit is skipped, not waited for.
- A candidate is charged for all of its known prompt, so that a lower one is only admitted where everything above it
  can finish what is known.
- Phase 2 preempts the lowest-priority holder among those that Phase 1 left out.

Who owns which blocks while a plan is made:
    evictable candidate        its held blocks, until Phase 2 takes them; charged only when it is granted tokens
    candidate not evictable    its held blocks, which nobody can take: charged before anybody else
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefill_worker.policies import Candidate


@dataclass(frozen=True, slots=True)
class Grant:
    """Up to so many tokens of the candidate may be computed in this step."""

    candidate: Candidate
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Both in priority order; together they are all candidates."""

    grants: list[Grant]
    left_out: list[Candidate]


def plan_step(
    ordered: Sequence[Candidate], token_budget: int, capacity_blocks: int, max_scheduled: int, block_size: int
) -> StepPlan:
    """Phase 1 over candidates in priority order.

    token_budget: tokens of one step. capacity_blocks: the pool, whoever holds it now. max_scheduled: most candidates
    of one step. block_size: tokens of one block. A candidate without tokens to compute is left out: it is parked.
    """
    plan = StepPlan([], [])
    room_blocks = capacity_blocks - sum(each.held_blocks for each in ordered if not each.evictable)
    for each in ordered:
        tokens = min(each.remaining_tokens, token_budget)
        charge_blocks = footprint_blocks(each, block_size)
        if not each.evictable:
            charge_blocks = max(0, charge_blocks - each.held_blocks)
        if tokens <= 0 or len(plan.grants) >= max_scheduled or charge_blocks > room_blocks:
            plan.left_out.append(each)
            continue
        plan.grants.append(Grant(each, tokens))
        token_budget -= tokens
        room_blocks -= charge_blocks
    return plan


def footprint_blocks(candidate: Candidate, block_size: int) -> int:
    """Blocks of everything that is known of its prompt."""
    return -(-candidate.known_tokens // block_size)


def victims(left_out: Sequence[Candidate]) -> Iterator[Candidate]:
    """Who may be preempted in Phase 2, lowest priority first: those left out that hold blocks which can be taken."""
    return (each for each in reversed(left_out) if each.held_blocks > 0 and each.evictable)
