"""What the client of a fuzzed session does: drawn here, carried out by the simulated and by the real engine.

A draw is what happens between two engine steps: mostly one thing, sometimes several inputs in a row.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cluster_core.engine_jobs import SessionMode

VOCABULARY = 250
_BURST = 12


class Kind(Enum):
    APPEND = auto()
    UPDATE = auto()
    CLOSE = auto()
    CANCEL = auto()


@dataclass(frozen=True, slots=True)
class Move:
    """token_ids: what is appended, the new prompt, or the last tokens of all."""

    kind: Kind
    token_ids: tuple[int, ...] = ()

    def prompt_after(self, prompt: Sequence[int]) -> list[int]:
        return list(self.token_ids) if self.kind is Kind.UPDATE else [*prompt, *self.token_ids]


class Client:
    """Draws prompts and moves. bases: long texts that prompts have the beginning of in common."""

    def __init__(self, rng: random.Random, longest: int, bases: int = 3) -> None:
        self._rng = rng
        self._longest = longest
        self._bases = [self.tokens(longest * 3 // 4) for _ in range(bases)]

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]

    def prompt(self) -> list[int]:
        """Of a plain request, or what a session is opened with."""
        base = self._rng.choice(self._bases)
        return base[: self._rng.randrange(len(base))] + self.tokens(self._rng.randrange(1, self._longest // 5))

    def first_prompt(self) -> list[int]:
        """What a session is opened with: now and then nothing, or one token."""
        return self.prompt() if self._rng.random() < 0.9 else self.tokens(self._rng.randrange(2))

    def moves(self, prompt: Sequence[int], mode: SessionMode, *, swapped: bool) -> list[Move]:
        """What comes next of a session with this prompt. swapped: its KV lies in host memory."""
        rng = self._rng
        if rng.random() < (0.12 if swapped else 0.03):
            return [Move(Kind.CANCEL)]
        chance = rng.random()
        if chance < 0.06:
            moves = [Move(Kind.APPEND, (token,)) for token in self.tokens(rng.randrange(2, _BURST))]
        elif chance < 0.75:
            change = self._update(prompt) if mode is SessionMode.UPDATE and rng.random() < 0.6 else self._append()
            moves = [change, *([self._append()] if rng.random() < 0.1 else [])]
        else:
            moves = []
        if not moves or rng.random() < 0.08:
            # Now and then the input is closed right after another change.
            moves.append(Move(Kind.CLOSE, tuple(self.tokens(rng.choice((0, 0, 1, 20))))))
        return self._fitting(prompt, moves)

    def _append(self) -> Move:
        sizes = (0, 1, 1, 5, self._longest // 10, self._longest // 5)
        return Move(Kind.APPEND, tuple(self.tokens(self._rng.choice(sizes))))

    def _update(self, prompt: Sequence[int]) -> Move:
        rng = self._rng
        chance = rng.random()
        if chance < 0.08:
            return Move(Kind.UPDATE, tuple(prompt))
        if chance < 0.14:
            return Move(Kind.UPDATE)
        if chance < 0.24:
            return Move(Kind.UPDATE, tuple(self.prompt()))
        kept = rng.randrange(len(prompt) + 1) if rng.random() < 0.8 else len(prompt)
        fresh = self.tokens(rng.choice((0, 0, 1, self._longest // 15, self._longest // 5)))
        return Move(Kind.UPDATE, (*prompt[:kept], *fresh))

    def _fitting(self, prompt: Sequence[int], moves: list[Move]) -> list[Move]:
        """Without those that would make the prompt too long, and without the close of an empty one."""
        fitting = []
        for move in moves:
            after = move.prompt_after(prompt)
            if len(after) <= self._longest and (after or move.kind is not Kind.CLOSE):
                fitting.append(move)
                prompt = after
        return fitting
