"""What happens in one run: a cluster, its requests and its faults; written as JSON and read from it. Pure.

All faults are healed by `HEALED_S`; what follows is quiet.
"""

import json
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from cluster_core.errors import InvalidInputError

# Requests and faults begin before, and everything is healed after so many seconds.
ACTIVE_S = 20.0
HEALED_S = 40.0
# The model's length.
MODEL_TOKENS = 250
ROUTER = "router"
REDIS = "redis"
_VOCABULARY = 256

# Kinds of faults that come together; those that touch no link between router and workers: what is cancelled ends soon.
NOTHING: tuple[str, ...] = ()
HANDOFFS = (*["half_open"] * 4, *["slow_pulls"] * 3, "cut", "loss")
WORKERS = ("kill", "drain", "cut_registry", "redis_down", "redis_empty")
# These come on top of whatever a seed has.
STALLS = ("stall",)
LOSSES = ("kill", "kill", "drain")
FREEZES = ("freeze", "freeze_pulls", "freeze_pulls")
POISON = ("poison",)
ROUTERS = ("kill_router",)


@dataclass(frozen=True, slots=True)
class Move:
    """One message of a session, so long after the one before. kind: append, update, finish, cancel or close.

    tokens: that it brings. keep: of the context, by an update.
    """

    kind: str
    after_s: float
    tokens: int = 0
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """shared_tokens: of its family's prompt. own_tokens: follow them, those of its variant, which others may have too.
    moves: of a session; none: a plain request.

    cancel_s: when its client leaves. timeout_s: its deadline. pause_s: how long its client reads nothing once it has a
    token.
    """

    number: int
    at_s: float
    family: int
    shared_tokens: int
    own_tokens: int
    variant: int
    max_tokens: int
    salt: str = ""
    seed: int | None = None
    timeout_s: float | None = None
    cancel_s: float | None = None
    mode: str = "APPEND"
    moves: tuple[Move, ...] = ()
    pause_s: float | None = None

    @property
    def prompt(self) -> list[int]:
        """Of a session, what it is opened with."""
        shared = drawn_tokens(f"family {self.family}", self.shared_tokens)
        return shared + drawn_tokens(f"variant {self.variant}", self.own_tokens)

    def piece(self, move: int) -> list[int]:
        return drawn_tokens(f"request {self.number} move {move}", self.moves[move].tokens)

    @property
    def most_prompt_tokens(self) -> int:
        """Of a session, as if nothing were replaced."""
        return self.shared_tokens + self.own_tokens + sum(move.tokens for move in self.moves)

    @property
    def is_withdrawn(self) -> bool:
        """Its client takes it back."""
        return self.cancel_s is not None or any(move.kind in ("cancel", "close") for move in self.moves)


@dataclass(frozen=True, slots=True)
class Fault:
    """kind: one of `FAULTS`. target: a worker, or two hosts as `one|other`. value: as the kind says."""

    kind: str
    at_s: float
    for_s: float
    target: str = ""
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """blocks: of one worker. pull_token_s: what a pull takes for each token. settings: as flags of the command line."""

    seed: int
    prefill: int
    decode: int
    prefill_blocks: int
    decode_blocks: int
    pull_token_s: float
    settings: tuple[tuple[str, Any], ...]
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    router_count: int = 1
    # Workers that do both, in place of those of the two pools.
    shared: int = 0

    @property
    def routers(self) -> list[str]:
        return [ROUTER, *(f"{ROUTER}-{i}" for i in range(1, self.router_count))]

    @property
    def has_prompt_links(self) -> bool:
        """Nothing keeps a cancel from its worker, or the worker from heeding it."""
        return all(fault.kind in (*WORKERS, *POISON, *ROUTERS) for fault in self.faults)

    @property
    def loses_routers(self) -> bool:
        return any(fault.kind in ROUTERS for fault in self.faults)

    @property
    def has_slow_readers(self) -> bool:
        return any(request.pause_s is not None for request in self.requests)

    @property
    def always_has_workers(self) -> bool:
        """Workers hang, drain or are killed, routers are killed, and nothing else happens; one is spared in each pool,
        and one router."""
        hit = {fault.target for fault in self.faults}
        names = (*self.workers, *self.routers)
        spared = {name.partition("-")[0] for name in names if name not in hit}
        return spared == {name.partition("-")[0] for name in names} and all(
            fault.kind in (*STALLS, *LOSSES, *ROUTERS) for fault in self.faults
        )

    @property
    def workers(self) -> list[str]:
        pools = {"prefill": self.prefill, "decode": self.decode, "shared": self.shared}
        return [f"{pool}-{i}" for pool, size in pools.items() for i in range(size)]


def drawn_tokens(name: str, count: int) -> list[int]:
    rng = Random(name)
    return [rng.randrange(_VOCABULARY) for _ in range(count)]


def encode(plan: Plan) -> str:
    return json.dumps(asdict(plan), indent=1)


def decode(text: str) -> Plan:
    """Raises InvalidInputError for what `encode` did not write."""
    try:
        values = json.loads(text)
        requests = [
            Request(**{**request, "moves": tuple(Move(**move) for move in request["moves"])})
            for request in values["requests"]
        ]
        return Plan(
            **{
                **values,
                "settings": tuple((name, value) for name, value in values["settings"]),
                "requests": tuple(requests),
                "faults": tuple(Fault(**fault) for fault in values["faults"]),
            }
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"is no plan of a run with faults: {error}", field="replay") from None
