"""`python -m tests.campaign.fuzz simulated|real|decode|shared`: random sessions, requests to decode schedulers, or both
to schedulers that do both, and exit code 1 when anything was wrong.

`--plant NAME` plants one of the bugs of `planted`, `planted_decode` or `planted_shared`, which has to be found;
`controls` plants one after the other. World N of a seed is always the same, and so is what it finds. The real engine's
trials share one engine.
"""

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster_core.clock import monotonic_s
from tests.campaign.fuzz.tally import Tally

if TYPE_CHECKING:
    from tests.campaign.fuzz.planted import Plant
    from tests.campaign.fuzz.real_engine import RealEngine

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

# A world that breaks compares nothing, and a plant may break every one.
_MOST_BROKEN = 5


class Kind(Enum):
    SIMULATED = "simulated"
    REAL = "real"
    DECODE = "decode"
    SHARED = "shared"

    @property
    def counted(self) -> str:
        """What a tally counts for it."""
        return "requests" if self in (Kind.DECODE, Kind.SHARED) else "sessions"

    @property
    def plants(self) -> "Mapping[str, Plant]":
        if self is Kind.DECODE:
            from tests.campaign.fuzz.planted_decode import DECODE_PLANTS

            return DECODE_PLANTS
        if self is Kind.SHARED:
            from tests.campaign.fuzz.planted_shared import SHARED_PLANTS

            return SHARED_PLANTS
        from tests.campaign.fuzz.planted import PLANTS

        return {name: plant for name, plant in PLANTS.items() if self is Kind.SIMULATED or plant.real}


Seed = Annotated[int, typer.Option()]
World = Annotated[int | None, typer.Option(min=0, help="That world alone.")]
PlantName = Annotated[str | None, typer.Option("--plant", help="One of the planted bugs.")]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON.")]


@app.command()
def simulated(
    sessions: Annotated[int, typer.Option(min=1, help="At least so many are compared.")] = 10_000,
    seed: Seed = 0,
    plant: PlantName = None,
    world: World = None,
    as_json: AsJson = False,
) -> None:
    """Real schedulers on a model runner that checks the KV, in worlds of every setting, V1 and V2."""
    from tests.campaign.fuzz.simulated import play

    most = 1 if world is not None else sessions
    _campaign(Kind.SIMULATED, play(seed, world or 0), most, seed, plant, as_json=as_json)


@app.command()
def decode(
    requests: Annotated[int, typer.Option(min=1, help="At least so many are compared.")] = 10_000,
    seed: Seed = 0,
    plant: PlantName = None,
    world: World = None,
    as_json: AsJson = False,
) -> None:
    """Real decode schedulers on a model runner that checks the KV, in worlds of every policy and setting, V1 and V2."""
    from tests.campaign.fuzz.decode_batches import play

    most = 1 if world is not None else requests
    _campaign(Kind.DECODE, play(seed, world or 0), most, seed, plant, as_json=as_json)


@app.command()
def shared(
    requests: Annotated[int, typer.Option(min=1, help="At least so many are compared, besides sessions.")] = 10_000,
    seed: Seed = 0,
    plant: PlantName = None,
    world: World = None,
    as_json: AsJson = False,
) -> None:
    """Real schedulers that do both, with sessions, hand-offs, pulls, decode batches and chunk bounds, V1 and V2."""
    from tests.campaign.fuzz.shared_engines import play

    most = 1 if world is not None else requests
    _campaign(Kind.SHARED, play(seed, world or 0), most, seed, plant, as_json=as_json)


@app.command()
def real(
    sessions: Annotated[int, typer.Option(min=1, help="At least so many are compared.")] = 1_000,
    seed: Seed = 0,
    plant: PlantName = None,
    does_both: Annotated[bool, typer.Option("--shared", help="An engine that does both.")] = False,
    as_json: AsJson = False,
) -> None:
    """One real engine in fp32, of prefill, or with whole requests that decode besides; all policies in turn."""
    from tests.campaign.fuzz.real_engine import RealEngine, play
    from worker_runtime.engine_settings import EngineRole

    engine = RealEngine(EngineRole.SHARED if does_both else EngineRole.PREFILL)
    with closing(engine):
        _campaign(Kind.REAL, play(engine, seed), sessions, seed, plant, as_json=as_json)


@app.command()
def controls(
    kind: Kind,
    sessions: Annotated[int, typer.Option(min=1, help="Most sessions, or requests, for each planted bug.")] = 300,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Plants every bug in turn, until it is found. Exit code 1 when one is not found that could be."""
    found: dict[str, int | None] = {}
    finder = _find_in_real_engine if kind is Kind.REAL else _find_in_simulation
    for name, after in finder(kind, sessions, seed):
        found[name] = after
        if not as_json:
            told = "not found" if after is None else f"found after {after:,} {kind.counted}"
            out.print(f"{name:<36} {told:<28} {kind.plants[name].breaks}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"engine": kind.value, "seed": seed, f"found_after_{kind.counted}": found}))
    sys.exit(1 if None in found.values() or len(found) < len(kind.plants) else 0)


def _campaign(kind: Kind, tallies: Iterator[Tally], most: int, seed: int, plant: str | None, *, as_json: bool) -> None:
    """Plays until so many were compared, says what came of it, and ends the process with that."""
    began_s = monotonic_s()
    with _planted(kind, plant):
        tally = _until(kind, most, tallies, as_json)
    _conclude(kind, tally, seed, plant, monotonic_s() - began_s, as_json=as_json)


def _find_in_simulation(kind: Kind, most: int, seed: int) -> Iterator[tuple[str, int | None]]:
    from tests.campaign.fuzz import decode_batches, shared_engines, simulated

    play = {Kind.DECODE: decode_batches.play, Kind.SHARED: shared_engines.play}.get(kind, simulated.play)
    for name in kind.plants:
        with _planted(kind, name):
            yield name, _found_after(kind, most, play(seed))


def _find_in_real_engine(kind: Kind, most: int, seed: int) -> Iterator[tuple[str, int | None]]:
    from tests.campaign.fuzz.real_engine import RealEngine

    engine = RealEngine()
    try:
        yield from find_planted(engine, most, seed)
    finally:
        engine.close()


def find_planted(engine: "RealEngine", most: int, seed: int) -> Iterator[tuple[str, int | None]]:
    """Every bug that a real engine can show, and after how many sessions it was found. A broken engine is the end."""
    from tests.campaign.fuzz.real_engine import play

    for name in Kind.REAL.plants:
        with _planted(Kind.REAL, name):
            after = _found_after(Kind.REAL, most, play(engine, seed))
        yield name, after
        if not engine.recover():
            return


def _found_after(kind: Kind, most: int, tallies: Iterator[Tally]) -> int | None:
    """How many were compared until something was wrong. None: nothing was."""
    played = 0
    for tally in tallies:
        played += getattr(tally, kind.counted)
        if tally.wrong:
            return played
        if played >= most:
            break
    return None


def _planted(kind: Kind, name: str | None) -> AbstractContextManager[Any]:
    if name is None:
        return nullcontext()
    if name not in kind.plants:
        raise typer.BadParameter(f"one of {', '.join(kind.plants)}", param_hint="--plant")
    return kind.plants[name].planted()


def _until(kind: Kind, most: int, tallies: Iterator[Tally], as_json: bool) -> Tally:
    """The sum of the tallies until so many were compared, or too much broke."""
    total, broken = Tally(), 0
    with _progress(kind, most, as_json) as (progress, task):
        for tally in tallies:
            total.add(tally)
            compared = getattr(total, kind.counted)
            broken += not getattr(tally, kind.counted)
            progress.update(task, completed=compared)
            if compared >= most or broken == _MOST_BROKEN:
                break
    return total


@contextmanager
def _progress(kind: Kind, most: int, as_json: bool) -> Iterator[tuple[Progress, Any]]:
    columns = (TextColumn(kind.counted), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=as_json or not err.is_terminal) as progress:
        yield progress, progress.add_task("", total=most)


def _conclude(kind: Kind, tally: Tally, seed: int, plant: str | None, seconds: float, *, as_json: bool) -> None:
    """Tells what came out, and ends the process: 1 when anything was wrong."""
    told = {**tally.told(), "seconds": round(seconds, 1)}
    if as_json:
        typer.echo(json.dumps({"engine": kind.value, "seed": seed, "plant": plant, **told}))
    else:
        findings = told.pop("findings")
        title = f"{kind.value} engine, seed {seed}" + (f", with {plant}" if plant else "")
        table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
        for name, value in told.items():
            if value or name == "wrong":
                table.add_row(name.replace("_", " "), f"{value:,}")
        out.print(table)
        for finding in findings:
            err.print(finding, style="red", markup=False, soft_wrap=True)
    sys.exit(1 if tally.wrong else 0)


def _silence() -> None:
    """Of vLLM, torch and their loading bars only errors are heard. To be called before they are imported."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "TQDM_DISABLE": "1"}
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    _silence()
    app()
