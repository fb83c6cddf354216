"""Requests drawn from a seed: conversations, groups and trees of prefixes, and coding agents.

`cluster_sim.workloads` says where their shapes come from.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np

from cluster_sim.workloads.requests import SimRequest, block_names
from cluster_sim.workloads.section import WorkloadSection

# Of a coding agent's first prompt.
_FIRST_TOKENS = (8000, 20_000)


def conversation(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    def requests() -> Iterator[SimRequest]:
        rng = random.Random(f"conversation/{seed}")
        names = itertools.count(1)
        # Conversations that may come back: what was said so far.
        open_ones: list[tuple[int, list[int]]] = []
        while True:
            output_tokens = max(1, min(4000, round(rng.lognormvariate(5.3, 1.0))))
            if open_ones and rng.random() < 0.42:
                # Later ones more often: a user who has just got an answer.
                place = -1 - min(len(open_ones) - 1, int(rng.expovariate(1 / 40)))
                tokens, blocks = open_ones.pop(place)
                tokens += round(rng.lognormvariate(6.0, 1.0))
            else:
                tokens, blocks = max(16, min(120_000, round(rng.lognormvariate(8.72, 1.15)))), []
            tokens = min(tokens, 126_000)
            blocks = _grown(blocks, _scaled(tokens, settings), settings, names)
            yield _request(0.0, tokens, output_tokens, blocks, settings)
            open_ones.append((tokens + output_tokens, blocks))
            if len(open_ones) > 400:
                open_ones.pop(0)

    return requests


def prefix_groups(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    return _grouped(settings, seed, levels=1)


def prefix_tree(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
    return _grouped(settings, seed, levels=settings.levels)


def agents(settings: WorkloadSection, seed: int) -> Callable[[], Iterator[SimRequest]]:
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
                blocks = _grown(blocks, _scaled(tokens, settings), settings, names)
                output = _output_tokens(rng)
                yield _request(at_s, tokens, output, blocks, settings)
                if left <= 1:
                    continue
                tokens, kept = turn(tokens, output)
                blocks = blocks[: int(len(blocks) * kept)]
                heapq.heappush(running, (at_s + rng.expovariate(1 / pause_s), number, tokens, blocks, left - 1))
            turns = max(1, round(rng.expovariate(1 / turns_mean)))
            heapq.heappush(running, (next_session_s, session, round(rng.uniform(*_FIRST_TOKENS)), [], turns))
            next_session_s += rng.expovariate(rate)

    return requests


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


def _request(at_s: float, tokens: int, output_tokens: int, blocks: list[int], settings: WorkloadSection) -> SimRequest:
    """tokens, output_tokens: as published, before they are scaled."""
    keys = block_names(np.array(blocks, dtype=np.uint64))
    return SimRequest(at_s, _scaled(tokens, settings), _scaled(output_tokens, settings), keys)


def _scaled(tokens: int, settings: WorkloadSection) -> int:
    return max(1, round(tokens * settings.token_scale))


def _grown(blocks: list[int], tokens: int, settings: WorkloadSection, names: Iterator[int]) -> list[int]:
    """The blocks of a prompt of so many tokens, of which some are known; too many are cut off."""
    full = tokens // settings.block_tokens
    return blocks[:full] + [next(names) for _ in range(full - len(blocks))]


def _output_tokens(rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(5.3, 0.9)))
