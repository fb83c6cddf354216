"""Grammars through a cluster and through one plain vLLM: the same tokens, and texts that the grammars take."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from rachis import AsyncClient, Generated, token_prompt
from rachis.v1 import generation_pb2 as generation

from benchmarks import identity
from benchmarks.direct_call import DirectWorker
from tests.structured.cases import drawn

_AT_ONCE = 8


@dataclass(slots=True)
class Tally:
    """whole: answers that ended with their grammar, all of which it has to take; the others were as long as they might
    be. pulled: over a hand-off. migrated: went on at another decode worker."""

    grammars: int = 0
    identical: int = 0
    whole: int = 0
    valid: int = 0
    pulled: int = 0
    migrated: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, seed: int, ours: Generated, theirs: Generated) -> None:
        case, grammar = drawn(seed)
        difference = identity.difference(case, ours, theirs, identity.LOGPROB_TOLERANCE)
        self.grammars += 1
        self.kinds[next(iter(grammar.fields))] += 1
        self.identical += difference is None
        self.pulled += ours.completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED
        self.migrated += ours.completion.route.migrations > 0
        if difference is not None:
            self.problems.append(f"seed {seed}: {difference}")
        if ours.completion.finish_reason == generation.FINISH_REASON_STOP:
            self.whole += 1
            self.valid += grammar.takes(ours.text)
            if not grammar.takes(ours.text):
                self.problems.append(f"seed {seed}: {grammar.fields} does not take {ours.text!r}")

    def as_json(self) -> dict[str, Any]:
        names = ("grammars", "identical", "whole", "valid", "pulled", "migrated")
        return {**{name: getattr(self, name) for name in names}, "kinds": dict(self.kinds), "problems": self.problems}


async def compared(
    seeds: Iterable[int], cluster: AsyncClient, plain: DirectWorker, on_done: Callable[[], None] = lambda: None
) -> Tally:
    """Several at once through the cluster, one after the other through plain vLLM."""
    tally, places, alone = Tally(), asyncio.Semaphore(_AT_ONCE), asyncio.Lock()

    async def one(seed: int) -> None:
        case, _ = drawn(seed)
        async with places:
            ours = await cluster.generate(token_prompt(case.token_ids), **case.sampling)
            async with alone:
                theirs = await plain.decode(list(case.token_ids), case.sampling)
        tally.add(seed, ours, theirs)
        on_done()

    async with asyncio.TaskGroup() as group:
        for seed in seeds:
            group.create_task(one(seed))
    return tally
