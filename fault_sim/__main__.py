"""`python -m fault_sim`: the cluster under seeded faults, and what was found."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster_core.errors import RachisError
from fault_sim import plan as plans
from fault_sim.campaign import Finding, Tally, commit, reduced, search
from fault_sim.drawing import EXTRAS
from fault_sim.run import Result, play

_FOUND = 1
_BAD_INPUT = 2


def main(arguments: list[str] | None = None) -> int:
    """0: every invariant held."""
    options = _parser().parse_args(arguments)
    console, errors = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    try:
        if options.replay:
            return _replay(options.replay, console, as_json=options.json, trace=options.trace)
    except (RachisError, OSError) as error:
        errors.print(f"[red]{error}[/]")
        return _BAD_INPUT
    tally, result = _search(options.seed, options.runs, options.extras, errors)
    finding = reduced(result) if result is not None else None
    if options.json:
        console.print_json(json.dumps(_as_json(tally, finding)))
    else:
        _tell(tally, finding, console)
    if finding is not None and options.write:
        Path(options.write).write_text(plans.encode(finding.plan))
    return _FOUND if finding is not None else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fault_sim", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="how many runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each further one has the next")
    parser.add_argument(
        "--with", dest="extras", action="append", default=[], choices=list(EXTRAS), help="every run has this"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--replay", metavar="FILE", help="play the plan in this file instead")
    parser.add_argument("--trace", action="store_true", help="with --replay: print everything that happened")
    parser.add_argument("--write", metavar="FILE", help="write the shrunk plan of what was found there")
    return parser


def _search(seed: int, runs: int, extras: Sequence[str], console: Console) -> tuple[Tally, Result | None]:
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("runs", total=runs)
        return search(range(seed, seed + runs), lambda result: progress.advance(bar), extras)


def _replay(path: str, console: Console, *, as_json: bool, trace: bool) -> int:
    result = play(plans.decode(Path(path).read_text()))
    if trace:
        for line in result.trace:
            console.print(line, markup=False, highlight=False)
    found = [{"invariant": each.invariant, "what": each.what} for each in result.violations]
    if as_json:
        console.print_json(json.dumps({"violations": found, "trace_sha256": result.trace_hash}))
    else:
        for each in found:
            console.print(f"{each['invariant']}: {each['what']}", markup=False)
        console.print(f"{len(found)} violations, trace {result.trace_hash[:16]}")
    return _FOUND if found else 0


def _as_json(tally: Tally, finding: Finding | None) -> dict[str, Any]:
    found = None
    if finding is not None:
        found = {
            "seed": finding.seed,
            "invariant": finding.invariant,
            "what": finding.what,
            "plan": json.loads(plans.encode(finding.plan)),
        }
    return {"commit": commit(), **tally.as_json(), "found": found}


def _tell(tally: Tally, finding: Finding | None, console: Console) -> None:
    console.print(f"{tally.runs} runs, {tally.virtual_s:.0f} s of simulated time, commit {commit()[:12] or 'unknown'}")
    for name, counts in (("answers", tally.codes), ("hand-offs", tally.handoffs), ("faults", tally.faults)):
        told = ", ".join(f"{key or 'none'} {count}" for key, count in counts.most_common())
        console.print(f"{name}: {told}", markup=False)
    console.print(
        f"answers went on at another worker {tally.migrations} times ({tally.handed_over} were handed over), "
        f"at another router {tally.resumes} times"
    )
    if finding is None:
        console.print("every invariant held")
        return
    console.print(f"seed {finding.seed} breaks `{finding.invariant}`: {finding.what}", markup=False, style="red")
    console.print("the smallest plan found, for --replay:")
    console.print(plans.encode(finding.plan), markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
