"""Requests of a simulated run, one after the other by arrival: from published traces, or drawn from a seed.

`open_workload` gives any of them the same form. Only what is running is held: memory does not grow with the length.

Where the shapes of the drawn ones come from:
    conversation     the shape of the Mooncake conversation trace (arXiv 2407.00079, FAST 2025): input tokens log-normal
                     with median 6,900 and mean 12,000, output with mean 340; conversations that come back with the
                     prompt of the turn before in front, so that some 40% of the tokens were seen before
    prefix_groups    groups of equal size share a prefix of a given length (FEATHER section 5)
    prefix_tree      groups of groups: each level shares its part of the prefix (FEATHER section 3.2)
    agents           coding agents: a prompt that grows turn by turn and is sometimes rewritten from a point on
                     (github callanjfox/kv-cache-tester: about 70 turns a session, inputs of tens of thousands)
    crawler, anns    sessions of the two retrievers of Stream2LLM (`cluster_sim.streaming_workload`): pages that are
                     appended, lists of documents that are replaced
    azure            a table of arrivals and lengths (github Azure/AzurePublicDataset, Splitwise): no prefixes are known
"""

import csv
import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cluster_configs.schema import Section
from cluster_core.engine_jobs import SessionMode
from cluster_core.errors import InvalidInputError
from cluster_sim.engine import SimInput
from cluster_sim.streaming_workload import TracedSession, WorkloadSpec, draw_sessions
from cluster_sim.traces import MOST_TOKENS, SHAPES, generated, open_trace
from kv_transfer.claims.prefix_chunks import Keys, chunk_keys, root_key

# Of a coding agent's first prompt.
_FIRST_TOKENS = (8000, 20_000)
# These say themselves when their requests arrive.
STREAMS: Mapping[str, SessionMode] = {"crawler": SessionMode.APPEND, "anns": SessionMode.UPDATE}
_TIMED = ("trace", "azure", "agents", *STREAMS)
KINDS = ("trace", "azure", "conversation", "prefix_groups", "prefix_tree", "agents", *STREAMS, *SHAPES)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_VOCABULARY, _LONGEST = 32_000, 131_072
# Under it the simulated service names prefixes.
SERVICE = "simulated"
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
    """requests: by arrival, the same each time they are asked for."""

    block_tokens: int
    requests: Callable[[], Iterator[SimRequest]]

    def __iter__(self) -> Iterator[SimRequest]:
        return self.requests()


class WorkloadSection(Section):
    """What is sent."""

    kind: str = Field("conversation", description="See `cluster_sim.workloads`.")
    file: Path | None = Field(None, description="Of `trace` and `azure`; a relative one stands beside the scenario.")
    requests: int = Field(
        1000, ge=0, description="0: all of the trace, once. More than it has: again, with prompts that nobody has seen."
    )
    arrivals: Literal["trace", "poisson", "bursty"] = Field(
        "poisson", description="`trace` keeps the times that the requests have, where they have any."
    )
    requests_per_s: float = Field(0.0, ge=0, description="Of arrivals that are drawn, and of `agents`.")
    speed: float = Field(1.0, gt=0, description="How many times faster a trace is played than it was recorded.")
    burstiness: float = Field(3.0, gt=0, le=100, description="Coefficient of variation of the gaps of `bursty`.")
    tenants: int = Field(1, ge=1, le=100_000, description="Prompts of two tenants share nothing; a few send most.")
    groups: int = Field(5, ge=1, le=100_000, description="Of `prefix_groups`; branches at each level of `prefix_tree`.")
    levels: int = Field(3, ge=1, le=16, description="Of `prefix_tree`.")
    shared_tokens: int = Field(2000, ge=0, description="What a group shares, over all levels.")
    own_tokens: int = Field(200, ge=0, description="Mean of what follows; evenly between half and one and a half.")
    output_tokens: int = Field(200, ge=1, description="Mean, likewise; of groups and trees.")
    streaming: bool = Field(True, description="Of sessions: false sends each when its prompt is whole.")
    block_tokens: int = Field(64, ge=1, le=65_536, description="Of the drawn kinds and `azure`; a trace has its own.")


def open_workload(settings: WorkloadSection, seed: int = 0) -> Workload:
    """Raises InvalidInputError, TraceError among it, for what cannot be."""
    if settings.kind not in KINDS:
        raise InvalidInputError(f"must be one of {', '.join(KINDS)}, got {settings.kind!r}", field="workload.kind")
    if settings.kind in ("trace", "azure") and settings.file is None:
        raise InvalidInputError("must name the trace", field="workload.file")
    if settings.kind not in ("trace", "azure") and not settings.requests:
        raise InvalidInputError("must be at least 1: a drawn workload has no end", field="workload.requests")
    if settings.requests_per_s <= 0 and (
        settings.kind not in ("trace", "azure", "agents") or settings.arrivals != "trace"
    ):
        raise InvalidInputError("must be above 0 where the arrivals are drawn", field="workload.requests_per_s")
    if settings.kind in STREAMS and settings.tenants > 1:
        raise InvalidInputError("must be 1: sessions have no tenants", field="workload.tenants")
    if settings.kind == "trace":
        assert settings.file is not None
        trace = open_trace(settings.file, seed=seed)
        block_tokens, base = trace.block_tokens, _again(
            lambda: (
                SimRequest(
                    each.arrival_s, each.input_tokens, each.output_tokens,
                    block_names(np.array(each.hashes[: each.input_tokens // trace.block_tokens], dtype=np.uint64)),
                )
                for each in trace
            ), settings.requests,
        )  # fmt: skip
    else:
        block_tokens = settings.block_tokens
        base = _KINDS_DRAWN.get(settings.kind, _few_shot)(settings, seed)
    return Workload(
        block_tokens, lambda: _limited(_timed(_of_tenants(base(), settings, seed), settings, seed), settings.requests)
    )


def _limited(requests: Iterator[SimRequest], at_most: int) -> Iterator[SimRequest]:
    return itertools.islice(requests, at_most) if at_most else requests


def _timed(requests: Iterator[SimRequest], settings: WorkloadSection, seed: int) -> Iterator[SimRequest]:
    """Arrivals as the settings say; in the order of the trace. A trace's clock that ticks coarsely is spread."""
    rng = random.Random(f"arrivals/{seed}")
    if settings.kind in STREAMS or (settings.arrivals == "trace" and settings.kind in _TIMED):
        for each in requests if settings.kind in STREAMS else _spread(requests, rng):
            yield _at(each, each.arrival_s / settings.speed)
        return
    shape = 1.0 if settings.arrivals != "bursty" else 1 / settings.burstiness**2
    now_s = 0.0
    for each in requests:
        yield _at(each, now_s)
        now_s += rng.gammavariate(shape, 1 / (shape * settings.requests_per_s))


def _spread(requests: Iterator[SimRequest], rng: random.Random) -> Iterator[SimRequest]:
    """Requests of one tick are spread evenly at random until the next one, in their order."""
    first_s: float | None = None
    tick: list[SimRequest] = []
    for each in itertools.chain(requests, [None]):
        if each is not None and (not tick or each.arrival_s == tick[0].arrival_s):
            tick.append(each)
            continue
        if not tick:
            return
        start_s = tick[0].arrival_s
        first_s = start_s if first_s is None else first_s
        length_s = (each.arrival_s - start_s) if each is not None else 0.0
        for request, share in zip(tick, sorted(rng.random() for _ in tick), strict=True):
            spread_s = share * length_s if len(tick) > 1 else 0.0
            yield _at(request, start_s - first_s + spread_s)
        tick = [each] if each is not None else []


def _of_tenants(requests: Iterator[SimRequest], settings: WorkloadSection, seed: int) -> Iterator[SimRequest]:
    if settings.tenants <= 1:
        yield from requests
        return
    rng = random.Random(f"tenants/{seed}")
    # A few tenants bring most requests (Zipf).
    weights = [1 / rank for rank in range(1, settings.tenants + 1)]
    for each in requests:
        number = rng.choices(range(settings.tenants), weights)[0]
        keys = block_names(each.keys ^ np.uint64(number + 1))
        yield replace(each, keys=keys, tenant=f"tenant-{number}")


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


# Drawn


def _conversation(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    def requests() -> Iterator[SimRequest]:
        rng = random.Random(f"conversation/{seed}")
        names = itertools.count(1)
        # Conversations that may come back: what was said so far.
        open_ones: list[tuple[int, list[int]]] = []
        while True:
            output_tokens = max(1, min(4000, round(rng.lognormvariate(5.3, 1.0))))
            if open_ones and rng.random() < 0.42:
                # Later ones more often: somebody who has just got an answer.
                place = -1 - min(len(open_ones) - 1, int(rng.expovariate(1 / 40)))
                tokens, blocks = open_ones.pop(place)
                tokens += round(rng.lognormvariate(6.0, 1.0))
            else:
                tokens, blocks = max(16, min(120_000, round(rng.lognormvariate(8.72, 1.15)))), []
            tokens = min(tokens, 126_000)
            full = tokens // settings.block_tokens
            blocks = blocks[:full] + [next(names) for _ in range(full - len(blocks))]
            yield SimRequest(0.0, tokens, output_tokens, block_names(np.array(blocks, dtype=np.uint64)))
            open_ones.append((tokens + output_tokens, blocks))
            if len(open_ones) > 400:
                open_ones.pop(0)

    return requests


def _prefix_groups(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    return _grouped(settings, seed, levels=1)


def _prefix_tree(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    return _grouped(settings, seed, levels=settings.levels)


def _grouped(settings: WorkloadSection, seed: int, levels: int) -> Callable[[], Iterator[SimRequest]]:
    """A tree with `groups` branches at each level; every level has its equal part of the shared tokens."""
    shared = settings.shared_tokens // settings.block_tokens

    def requests() -> Iterator[SimRequest]:
        rng = random.Random(f"groups/{seed}")
        for number in itertools.count(1):
            blocks: list[int] = []
            path = 0
            for level in range(levels):
                path = path * settings.groups + rng.randrange(settings.groups) + 1
                wanted = shared * (level + 1) // levels - len(blocks)
                blocks += [(level + 1) << 56 | path << 24 | place for place in range(wanted)]
            own = round(settings.own_tokens * rng.uniform(0.5, 1.5))
            tokens = max(1, len(blocks) * settings.block_tokens + own)
            blocks += [number << 16 | place for place in range(tokens // settings.block_tokens - len(blocks))]
            output = max(1, round(settings.output_tokens * rng.uniform(0.5, 1.5)))
            yield SimRequest(0.0, tokens, output, block_names(np.array(blocks, dtype=np.uint64)))

    return requests


def _agents(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    """Sessions start as a Poisson process, so that about `requests_per_s` come in all; each goes on by itself."""
    turns_mean, pause_s = 70, 20.0

    def requests() -> Iterator[SimRequest]:
        rng = random.Random(f"agents/{seed}")
        names = itertools.count(1)

        def turn(tokens: int, output: int) -> tuple[int, float]:
            """The next prompt's tokens, and how much of the one before it keeps."""
            tokens += output + round(rng.lognormvariate(6.6, 1.1))
            if rng.random() >= 0.06 and tokens <= 120_000:
                return tokens, 1.0
            # Rewritten: what was said is summed up behind the first part.
            kept = rng.uniform(0.1, 0.6)
            return max(64, int(tokens * (kept + 0.1))), kept

        rate = (settings.requests_per_s or 1.0) / turns_mean
        # (next turn, session, tokens, blocks, turns left)
        running: list[tuple[float, int, int, list[int], int]] = []
        # As many as run at any time, in the midst of their turns.
        begun = round(rate * turns_mean * pause_s)
        for session in range(begun):
            tokens = round(rng.uniform(*_FIRST_TOKENS))
            for _ in range(round(rng.expovariate(1 / turns_mean))):
                tokens, _ = turn(tokens, _output_tokens(rng))
            left = max(1, round(rng.expovariate(1 / turns_mean)))
            heapq.heappush(running, (rng.expovariate(1 / pause_s), session, tokens, [], left))
        next_session_s = rng.expovariate(rate)
        for session in itertools.count(begun):
            while running and running[0][0] <= next_session_s:
                at_s, number, tokens, blocks, left = heapq.heappop(running)
                full = tokens // settings.block_tokens
                blocks = blocks[:full] + [next(names) for _ in range(full - len(blocks))]
                output = _output_tokens(rng)
                yield SimRequest(at_s, tokens, output, block_names(np.array(blocks, dtype=np.uint64)))
                if left <= 1:
                    continue
                tokens, kept = turn(tokens, output)
                blocks = blocks[: int(len(blocks) * kept)]
                heapq.heappush(running, (at_s + rng.expovariate(1 / pause_s), number, tokens, blocks, left - 1))
            turns = max(1, round(rng.expovariate(1 / turns_mean)))
            heapq.heappush(running, (next_session_s, session, round(rng.uniform(*_FIRST_TOKENS)), [], turns))
            next_session_s += rng.expovariate(rate)

    return requests


def _output_tokens(rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(5.3, 0.9)))


def _streams(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    mode = STREAMS[settings.kind]
    spec = WorkloadSpec(mode, settings.requests, settings.requests_per_s, seed=seed)

    def requests() -> Iterator[SimRequest]:
        rng = random.Random(f"streams/{seed}")
        for session in draw_sessions(spec, _VOCABULARY, _LONGEST):
            output = max(1, round(settings.output_tokens * rng.uniform(0.5, 1.5)))
            yield _session(session, output, settings.block_tokens)

    return requests if settings.streaming else lambda: _when_whole(requests())


def _session(session: TracedSession, output_tokens: int, block_tokens: int) -> SimRequest:
    prompt = np.array(session.prefix, dtype=np.uint32)
    inputs = [(0.0, _input(prompt, prompt, 0, block_tokens))]
    for number, each in enumerate(session.inputs, 1):
        before, is_last = prompt, number == len(session.inputs)
        brought = np.array([*each.tokens, *(session.closing if is_last else ())], dtype=np.uint32)
        replaces = session.mode is SessionMode.UPDATE
        prompt = brought if replaces else np.concatenate([before, brought])
        shorter = min(len(before), len(prompt))
        differing = np.flatnonzero(before[:shorter] != prompt[:shorter])
        kept = int(differing[0]) if len(differing) else shorter
        following = _input(prompt, brought, kept, block_tokens, replaces=replaces, is_last=is_last)
        inputs.append((each.at_s - session.arrival_s, following))
    return SimRequest(
        session.arrival_s, len(prompt), output_tokens, inputs[-1][1].keys, inputs=tuple(inputs), mode=session.mode
    )


def _input(
    prompt: NDArray[np.uint32], brought: NDArray[np.uint32], kept: int, block_tokens: int, **flags: bool
) -> SimInput:
    return SimInput(
        brought.tolist(), len(prompt), kept, chunk_keys(prompt, root_key(SERVICE, ""), block_tokens), **flags
    )


def _when_whole(sessions: Iterator[SimRequest]) -> Iterator[SimRequest]:
    """Each as a request that arrives when its prompt is whole, by that time."""
    waiting: list[tuple[float, int, SimRequest]] = []
    for number, each in enumerate(sessions):
        while waiting and waiting[0][0] <= each.arrival_s:
            yield heapq.heappop(waiting)[2]
        whole = replace(each, arrival_s=each.complete_s, inputs=())
        heapq.heappush(waiting, (whole.arrival_s, number, whole))
    while waiting:
        yield heapq.heappop(waiting)[2]


def _few_shot(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    trace = generated(
        SHAPES[settings.kind], requests=min(settings.requests, sum(SHAPES[settings.kind].queries)),
        block_tokens=settings.block_tokens, seed=seed,
    )  # fmt: skip
    return _again(
        lambda: (
            SimRequest(
                each.arrival_s, each.input_tokens, each.output_tokens,
                block_names(np.array(each.hashes[: each.input_tokens // trace.block_tokens], dtype=np.uint64)),
            )
            for each in trace
        ), settings.requests,
    )  # fmt: skip


def _azure(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
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


_KINDS_DRAWN: dict[str, Callable[[WorkloadSection, int], Callable[[], Iterator[SimRequest]]]] = {
    "azure": _azure,
    "conversation": _conversation,
    "prefix_groups": _prefix_groups,
    "prefix_tree": _prefix_tree,
    "agents": _agents,
    **dict.fromkeys(STREAMS, _streams),
}


def _at(request: SimRequest, arrival_s: float) -> SimRequest:
    return replace(request, arrival_s=arrival_s, output_tokens=max(1, request.output_tokens))


def block_names(blocks: Keys) -> Keys:
    """Blocks are numbered, keys look like hashes: a bijection that mixes (splitmix64); 0 names nothing."""
    mixed = blocks + _MIX
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _FACTORS[1]
    mixed ^= mixed >> np.uint64(31)
    mixed[mixed == 0] = 1
    return mixed
