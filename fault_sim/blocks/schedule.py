"""Which runs of a `BlockEngine` compute in a step, and whose blocks are taken when there are none left.

Requests that came earlier never lose blocks to later ones; sessions that have nothing to compute lose theirs to all.
"""

from collections import deque
from collections.abc import Callable

from fault_sim.blocks.content import BlockContent
from fault_sim.blocks.gate import Gate
from fault_sim.blocks.run import Run

MOST_RUNNING = 32
_STEP_TOKENS = 64


class BlockSchedule:
    """A run waits, runs, or is parked: a session whose blocks were taken while it had nothing to compute."""

    def __init__(self, content: BlockContent, gate: Gate) -> None:
        self.waiting: deque[Run] = deque()
        self.running: list[Run] = []
        self.parked: list[Run] = []
        self._content = content
        self._gate = gate
        self._pool = content.pool

    def admit(self, begun: Callable[[Run], None], tried: Callable[[Run], None]) -> None:
        """As many as there is memory for; a session that has nothing to compute takes nobody's place. tried: called
        before a run is looked at; begun: once it has its blocks."""
        while self.waiting and sum(not _is_idle(run) for run in self.running) < MOST_RUNNING:
            run = self.waiting[0]
            tried(run)
            if not self._begin(run):
                return
            begun(run)
            self.waiting.popleft()
            self.running.append(run)

    def has_input(self, run: Run) -> None:
        """A session has something to compute again."""
        if run in self.parked:
            self.parked.remove(run)
            self.waiting.append(run)

    def remove(self, run: Run) -> None:
        """Wherever it is; its blocks are its own still."""
        for place in (self.waiting, self.running, self.parked):
            if run in place:
                place.remove(run)

    def decodes(self, run: Run) -> bool:
        """It is a job that has an output, and its blocks hold all its tokens but the last."""
        is_whole = run.session is None and run.is_started and run.computed == len(run.tokens) - 1
        return is_whole and run in self.running and not run.pulling

    def step(self) -> dict[Run, int]:
        """Tokens that each run gets computed; their blocks are there."""
        budget, step = _STEP_TOKENS, dict[Run, int]()
        for run in list(self.running):
            count = min(run.wanted - run.computed, budget)
            if run.pulling or count <= 0 or run not in self.running:
                continue
            count = self._gate.allows(run, count)
            if count > 0 and self._has_room(run, run.computed + count, step):
                step[run] = count
                budget -= count
        return step

    def _begin(self, run: Run) -> bool:
        """False while there is no memory for it. What of its tokens is cached is taken from there."""
        cached = self._content.cached(run)
        while self._missing(run, cached) > self._pool.free:
            idle = self._idle_holder()
            if idle is None:
                return False
            self._preempt(idle)
        self._pool.take(cached)
        run.blocks = cached
        run.computed = len(cached) * self._content.size
        if not run.is_started:
            run.cached_tokens = run.computed
        if run.session is not None:
            run.session.computed(0, cached=run.computed)
        return True

    def _missing(self, run: Run, cached: list[int]) -> int:
        """Free blocks that it would take."""
        needed = -(-len(run.tokens) // self._content.size)
        return needed - len(cached) + sum(not self._pool.is_held(block) for block in cached)

    def _has_room(self, run: Run, tokens: int, step: dict[Run, int]) -> bool:
        while len(run.blocks) * self._content.size < tokens:
            block = self._pool.allocate()
            if block is not None:
                run.blocks.append(block)
                continue
            victim = self._victim(run)
            if victim is None:
                return False
            self._preempt(victim)
            step.pop(victim, None)
            if victim is run:
                return False
        return True

    def _victim(self, wanting: Run) -> Run | None:
        """Whose blocks it gets: an idle session's, or those of the last that came, which may be its own."""
        idle = self._idle_holder(wanting)
        if idle is not None:
            return idle
        later = self.running[self.running.index(wanting) :]
        last = [run for run in later if run.blocks and not run.pulling][-1:]
        is_alone = not any(run.blocks and not run.pulling for run in self.running if run is not wanting)
        return last[0] if last and not (last[0] is wanting and is_alone) else None

    def _idle_holder(self, wanting: Run | None = None) -> Run | None:
        """A session that has nothing to compute, and blocks."""
        idle = (run for run in self.running if _is_idle(run) and run.blocks)
        return next((run for run in idle if run is not wanting), None)

    def _preempt(self, run: Run) -> None:
        """An idle session waits for more input, everybody else is next."""
        is_idle = _is_idle(run)
        self.running.remove(run)
        self._content.give_back(run)
        if is_idle:
            self.parked.append(run)
        else:
            self.waiting.appendleft(run)
        if run.session is not None:
            run.session.preempted()


def _is_idle(run: Run) -> bool:
    """A session that takes input and has none to compute."""
    return run.is_open and run.computed == run.wanted
