"""Which contenders are computed in a step, and which may lose blocks for it: both phases' decisions, pure.

Source: Stream2LLM (arXiv:2604.16395), section 4.1; docs/decisions/0014 says why it departs from the paper's text:

- Phase 1 charges the whole pool that contenders can hold, not the blocks that are free: what a lower priority holds
  can be taken in Phase 2. It changes nothing. What does not fit is skipped, not waited for.
- A contender is charged for all of its known prompt, so that a lower one is only admitted where everything above it
  can finish what is known.
- Phase 2 preempts the lowest-priority holder among those that Phase 1 left out.
- What has begun keeps its blocks, and what it needs to end, while tenants take turns (`prefill_worker.prompt_turns`):
  only a lower priority number takes them.

Who owns which blocks while a plan is made:
    evictable contender        its held blocks, until Phase 2 takes them; charged only when it is granted tokens
    contender not evictable    its held blocks, which nobody can take: charged before anybody else
    lease, load                its blocks: the pool is smaller by them, and to contenders that share them they are free
    contender that keeps       all blocks of its prompt, against those of its own priority and of higher numbers
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from prefill_worker.partial_budget import PartialBudget
from prefill_worker.policies import Contender


@dataclass(frozen=True, slots=True)
class Grant:
    """Up to so many tokens of the contender may be computed in this step."""

    contender: Contender
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Both in priority order; together they are all contenders."""

    grants: list[Grant]
    left_out: list[Contender]
    # Of those left out, by name, who keeps its blocks.
    kept: Collection[str] = ()


class _Room:
    """Blocks that are left to charge. Shared blocks are charged once, to the first that is charged."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._paid: dict[int, int] = {}

    def hold(self, contender: Contender) -> None:
        """What nobody can take from it, before anybody is charged."""
        self._take(contender, contender.held_blocks - self._shared(contender))

    def has(self, contender: Contender, blocks: int, kept: int = 0, kept_in_front: int = 0) -> bool:
        """blocks: all of its own. kept: what others must have left, of which so many begin as this one does."""
        return self._price(contender, blocks, kept_in_front) + kept <= self._blocks

    def charge(self, contender: Contender, blocks: int) -> int:
        """blocks: all of its own. Returns what it takes."""
        return self._take(contender, self._price(contender, blocks))

    def copy(self) -> "_Room":
        other = _Room(self._blocks)
        other._paid = dict(self._paid)
        return other

    def _take(self, contender: Contender, price: int) -> int:
        self._blocks -= price
        if contender.first_block >= 0:
            # Others that share blocks with this one share those in front.
            paid = self._paid.get(contender.first_block, 0)
            self._paid[contender.first_block] = max(paid, contender.shared_blocks, contender.held_blocks)
        return price

    def _price(self, contender: Contender, blocks: int, paid: int = 0) -> int:
        has = self._shared(contender, paid) if contender.evictable else contender.held_blocks
        return max(0, blocks - has)

    def _shared(self, contender: Contender, paid: int = 0) -> int:
        """Of its blocks, how many somebody has been charged for, or has paid here."""
        paid = max(paid, self._paid.get(contender.first_block, 0))
        return max(contender.leased_blocks, min(contender.shared_blocks, paid))


class _Kept:
    """What those that have begun need to end, as far as all of it fits. What still takes input is no exception while it
    has tokens to compute: it would be computed again and again beside whole prompts of others, which always come. Once
    it has none it has begun nothing, and anybody takes its blocks; so with one that is held back, which may not end for
    as long as it takes input."""

    def __init__(self, begun: Sequence[Contender], room: _Room, block_size: int) -> None:
        self._blocks: dict[str, int] = {}
        # By priority.
        self._needed: Counter[int] = Counter()
        # By first block and priority, how many the longest holds.
        self._in_front: dict[int, Counter[int]] = {}
        for each in begun:
            blocks = footprint_blocks(each, block_size)
            if room.has(each, blocks):
                self._blocks[each.request_id] = room.charge(each, blocks)
                self._needed[each.priority] += self._blocks[each.request_id]
                front = self._in_front.setdefault(each.first_block, Counter())
                front[each.priority] = max(front[each.priority], each.held_blocks)

    @property
    def names(self) -> Collection[str]:
        return self._blocks.keys()

    def against(self, each: Contender) -> int:
        """Blocks that this one may not take."""
        if not self._blocks or each.request_id in self._blocks:
            return 0
        return sum(blocks for priority, blocks in self._needed.items() if priority <= each.priority)

    def in_front(self, each: Contender) -> int:
        """How many of those begin as this one does: what it shares of them is there once."""
        front: Mapping[int, int] = self._in_front.get(each.first_block, {})
        return max((blocks for priority, blocks in front.items() if priority <= each.priority), default=0)

    def granted(self, each: Contender) -> None:
        """It is charged for itself from now on."""
        self._needed[each.priority] -= self._blocks.pop(each.request_id, 0)


def plan_step(
    ordered: Sequence[Contender],
    token_budget: int,
    capacity_blocks: int,
    max_scheduled: int,
    block_size: int,
    *,
    overdue_since_s: float = -inf,
    most_adapters: int = 0,
    partial: PartialBudget | None = None,
    begun: Sequence[Contender] = (),
) -> StepPlan:
    """Phase 1 over contenders in priority order.

    token_budget: tokens of one step. capacity_blocks: the pool, whoever holds it now. max_scheduled: most contenders
    of one step. block_size: tokens of one block. A contender without tokens to compute is left out: it is parked.
    overdue_since_s: behind one that has waited since then and does not fit, none is admitted that holds nothing;
    otherwise small ones could keep a large one out for ever. most_adapters: different adapters of one step; those that
    come first say which. partial: what sessions that still take input may compute, in a step without a complete prompt;
    in others nothing. None: there is no such bound. begun: of them those that keep their blocks, as far as these fit
    together, in this order.
    """
    room, closed, adapters = _Room(capacity_blocks), False, set[int]()
    for each in ordered:
        if not each.evictable:
            room.hold(each)
    ending = [each for each in begun if partial is None or each.complete or partial.most_tokens(each)]
    kept = _Kept(ending, room.copy(), block_size)
    plan = StepPlan([], [], kept.names)
    for each in ordered:
        tokens = min(each.remaining_tokens, token_budget)
        if partial is not None and not each.complete:
            tokens = min(tokens, partial.most_tokens(each))
        blocks = footprint_blocks(each, block_size)
        has_place = each.adapter in adapters or not each.adapter or len(adapters) < most_adapters
        if tokens <= 0 or len(plan.grants) >= max_scheduled or (closed and not each.held_blocks):
            plan.left_out.append(each)
        elif not has_place or not room.has(each, blocks, kept.against(each), kept.in_front(each)):
            plan.left_out.append(each)
            closed = closed or each.waiting_since_s <= overdue_since_s
        else:
            plan.grants.append(Grant(each, tokens))
            token_budget -= tokens
            if partial is not None and not each.decodes:
                partial.granted(each, tokens)
            room.charge(each, blocks)
            kept.granted(each)
            adapters |= {each.adapter} - {0}
    return plan


def reached_tokens(grant: Grant) -> int:
    """Tokens of it that are computed or found when the step has run."""
    contender = grant.contender
    return max(contender.computed_tokens, contender.known_tokens - contender.remaining_tokens) + grant.tokens


def footprint_blocks(contender: Contender, block_size: int) -> int:
    """Blocks of everything that is known of its prompt."""
    return -(-contender.known_tokens // block_size)


def victims(left_out: Sequence[Contender], kept: Collection[str] = ()) -> Iterator[Contender]:
    """What may be preempted in Phase 2, lowest priority first: those left out that hold blocks which can be taken.

    kept: by name, those of them that come last."""
    holders = [each for each in reversed(left_out) if each.held_blocks > 0 and each.evictable]
    return iter(sorted(holders, key=lambda each: each.request_id in kept) if kept else holders)
