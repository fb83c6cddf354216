"""Requests of a trace or a table of arrivals, again from its start where more of them are wanted."""

import csv
import itertools
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from cluster_core.errors import InvalidInputError
from cluster_sim.workloads.few_shot import SHAPES, generated
from cluster_sim.workloads.requests import SimRequest, block_names
from cluster_sim.workloads.section import WorkloadSection
from cluster_sim.workloads.trace_lines import MOST_TOKENS
from cluster_sim.workloads.traces import Trace, TraceFile


def of_trace(trace: Trace | TraceFile, wanted: int) -> Callable[[], Iterator[SimRequest]]:
    """wanted: how many requests; 0: all of it, once."""
    return _again(
        lambda: (
            SimRequest(
                each.arrival_s, each.input_tokens, each.output_tokens,
                block_names(np.array(each.hashes[: each.input_tokens // trace.block_tokens], dtype=np.uint64)),
            )
            for each in trace
        ), wanted,
    )  # fmt: skip


def few_shot(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    trace = generated(
        SHAPES[settings.kind], requests=min(settings.requests, sum(SHAPES[settings.kind].queries)),
        block_tokens=settings.block_tokens, seed=seed,
    )  # fmt: skip
    return of_trace(trace, settings.requests)


def azure(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    assert settings.file is not None
    path = settings.file

    def rows() -> Iterator[SimRequest]:
        names = itertools.count(1)
        first_s: float | None = None
        last_s = 0.0
        for line, row in enumerate(_table(path), 2):
            try:
                at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                if not (0 <= prompt <= MOST_TOKENS and 0 <= output <= MOST_TOKENS):
                    raise ValueError
            except (KeyError, TypeError, ValueError):
                raise InvalidInputError(
                    f"{path}, line {line}: needs TIMESTAMP, ContextTokens and GeneratedTokens", field="workload.file"
                ) from None
            if at_s < last_s:
                raise InvalidInputError(f"{path}, line {line}: TIMESTAMP goes back", field="workload.file")
            last_s = at_s
            first_s = at_s if first_s is None else first_s
            blocks = [next(names) for _ in range(prompt // settings.block_tokens)]
            keys = block_names(np.array(blocks, dtype=np.uint64))
            yield SimRequest(at_s - first_s, max(1, prompt), max(1, output), keys)

    return _again(rows, settings.requests)


def _table(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}", field="workload.file") from None


def _again(trace: Callable[[], Iterator[SimRequest]], wanted: int) -> Callable[[], Iterator[SimRequest]]:
    """The trace, and again from its start where more is wanted: later, and with other prompts."""

    def requests() -> Iterator[SimRequest]:
        start_s, last_s, gap_s = 0.0, 0.0, 0.0
        for turn in itertools.count():
            number = 0
            for each in trace():
                number += 1
                last_s = start_s + each.arrival_s
                keys = block_names(each.keys ^ np.uint64(turn << 32)) if turn else each.keys
                yield SimRequest(last_s, each.prompt_tokens, each.output_tokens, keys)
            if not number:
                raise InvalidInputError("has no requests", field="workload.file")
            gap_s = (last_s - start_s) / number
            start_s = last_s + gap_s
            if not wanted:
                return

    return requests
