"""Many runs, one for each seed. The first that breaks an invariant is shrunk, so that it can be read and replayed."""

import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_sim.drawing import drawn
from fault_sim.plan import Plan
from fault_sim.run import Result, play
from fault_sim.shrink import shrunk


@dataclass(frozen=True, slots=True)
class Finding:
    """A plan that breaks an invariant, as it was drawn and shrunk. what: of the shrunk plan."""

    seed: int
    invariant: str
    what: str
    plan: Plan


@dataclass(slots=True)
class Tally:
    """codes, handoffs: of all requests, by what their clients got. virtual_s: of all runs."""

    runs: int = 0
    virtual_s: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    handoffs: Counter[str] = field(default_factory=Counter)
    migrations: int = 0
    resumes: int = 0
    handed_over: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.runs += 1
        self.virtual_s += result.virtual_s
        self.codes += result.codes
        self.handoffs += result.handoffs
        self.migrations += result.migrations
        self.resumes += result.resumes
        self.handed_over += result.handed_over
        self.faults += Counter(fault.kind for fault in result.plan.faults)

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "virtual_s": round(self.virtual_s, 3),
            "codes": dict(sorted(self.codes.items())),
            "handoffs": dict(sorted(self.handoffs.items())),
            "migrations": self.migrations,
            "resumes": self.resumes,
            "handed_over": self.handed_over,
            "faults": dict(sorted(self.faults.items())),
        }


def search(
    seeds: Iterable[int], on_run: Callable[[Result], None] = lambda result: None, forced: Sequence[str] = ()
) -> tuple[Tally, Result | None]:
    """Until an invariant breaks: then that run too. forced: extras that every plan has."""
    tally = Tally()
    for seed in seeds:
        result = play(drawn(seed, forced))
        tally.add(result)
        on_run(result)
        if result.violations:
            return tally, result
    return tally, None


def reduced(result: Result) -> Finding:
    """The smallest plan found that breaks the first invariant that the run broke."""
    invariant = result.violations[0].invariant

    def still_fails(plan: Plan) -> bool:
        return any(violation.invariant == invariant for violation in play(plan).violations)

    plan = shrunk(result.plan, still_fails)
    what = next(each.what for each in play(plan).violations if each.invariant == invariant)
    return Finding(result.plan.seed, invariant, what, plan)


def commit() -> str:
    """Of this code, where it lies in a repository; empty otherwise."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
