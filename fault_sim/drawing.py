"""The plans of seeds: which requests come, and what goes wrong meanwhile. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from fault_sim.plan import (
    ACTIVE_S,
    FREEZES,
    HANDOFFS,
    HEALED_S,
    LOSSES,
    MODEL_TOKENS,
    NOTHING,
    POISON,
    REDIS,
    ROUTER,
    ROUTERS,
    STALLS,
    WORKERS,
    Fault,
    Move,
    Plan,
    Request,
)

_LONG_STALL_S = 25.0


def drawn(seed: int, forced: Sequence[str] = ()) -> Plan:
    """The plan of a seed. One in ten has no faults: there everything has to succeed. forced: extras that it has."""
    rng = Random(seed)
    theme = rng.choice(_THEMES)
    prefill, decode = (1, rng.randint(2, 3)) if theme is HANDOFFS else (rng.randint(1, 3), rng.randint(1, 3))
    is_tight = theme is HANDOFFS or rng.random() < 0.5
    plan = Plan(
        seed=seed,
        prefill=prefill,
        decode=decode,
        prefill_blocks=rng.choice((64, 80, 112)) if is_tight else 512,
        decode_blocks=rng.choice((64, 80, 112)) if is_tight else 512,
        pull_token_s=0.02 if theme is HANDOFFS else rng.choice((0.0002, 0.002, 0.02)),
        settings=(
            ("placement.disaggregation", rng.choice(("always", "always", "conditional"))),
            ("placement.policy", rng.choice(("hotness", "hotness", "round_robin", "prefix_only"))),
            ("router.prefill_attempts", rng.randint(1, 3)),
            ("router.max_in_flight_requests", rng.choice((4, 64))),
            ("streaming.max_unapplied_inputs", rng.choice((1, 4, 256))),
        ),
        requests=tuple(_requests(rng, theme, rng.randint(50 if theme is HANDOFFS else 20, 60))),
        faults=(),
    )
    faults = rng.randint(8, 14) if theme is HANDOFFS else rng.randint(1, 8)
    plan = replace(plan, faults=tuple(_fault(rng, theme, plan.workers) for _ in range(faults if theme else 0)))
    for name, extend in EXTRAS.items():
        more = Random(f"{name} {seed}")
        is_drawn = more.random() < _SHARE_OF_EXTRAS and bool(theme)
        if is_drawn or name in forced:
            plan = extend(more, plan)
    return plan


_BY_OBJECTIVES = {
    "placement.policy": "objectives", "objectives.ttft_s": 0.5, "objectives.tpot_s": 0.1,
    "pools.prefill.workers": 0, "pools.decode.workers": 0, "pools.shared.workers": 1,
}  # fmt: skip


def with_shared_workers(plan: Plan) -> Plan:
    """The same plan over workers that do both: as many, each with the faults of one of the others. Those of odd seeds
    are placed on by the objectives, which tell of the future what block engines measure."""
    names = {name: f"shared-{place}" for place, name in enumerate(plan.workers)}

    def renamed(target: str) -> str:
        return "|".join(names.get(each, each) for each in target.split("|"))

    faults = tuple(replace(fault, target=renamed(fault.target)) for fault in plan.faults)
    settings = {**dict(plan.settings), **(_BY_OBJECTIVES if plan.seed % 2 else {})}
    return replace(plan, prefill=0, decode=0, shared=len(names), faults=faults, settings=tuple(settings.items()))


def _with(rng: Random, plan: Plan, kinds: Sequence[str]) -> Plan:
    more = (_fault(rng, kinds, plan.workers) for _ in range(rng.randint(1, 4)))
    return replace(plan, faults=(*plan.faults, *more))


def _with_poison(rng: Random, plan: Plan) -> Plan:
    """Engines die of a request, whose client asks again and again."""
    plain = [request for request in plan.requests if not request.moves]
    if not plain:
        return plan
    poison = replace(rng.choice(plain), timeout_s=None, cancel_s=None)
    again = (
        replace(poison, number=len(plan.requests) + place, at_s=poison.at_s + round(rng.uniform(0, 10), 3))
        for place in range(rng.randint(1, 5))
    )
    fault = Fault("poison", 0.0, HEALED_S, value=poison.number)
    requests = tuple(poison if request.number == poison.number else request for request in plan.requests)
    return replace(plan, requests=(*requests, *again), faults=(*plan.faults, fault))


def _with_slow_readers(rng: Random, plan: Plan) -> Plan:
    def drawn_again(request: Request) -> Request:
        is_slow = rng.random() < 0.3
        return (
            replace(request, pause_s=round(rng.choice((rng.uniform(0, 2), rng.uniform(2, 30))), 3))
            if is_slow
            else request
        )

    return replace(plan, requests=tuple(map(drawn_again, plan.requests)))


def _with_stalls_alone(rng: Random, plan: Plan) -> Plan:
    """For longer than a request may take; the first worker of each pool goes on."""
    may_hang = [name for name in plan.workers if not name.endswith("-0")]
    drawn_faults = [_fault(rng, STALLS, may_hang) for _ in range(rng.randint(1, 3) if may_hang else 0)]
    return replace(
        plan, faults=tuple(replace(fault, at_s=fault.at_s / 2, for_s=_LONG_STALL_S) for fault in drawn_faults)
    )


def _with_losses_alone(rng: Random, plan: Plan) -> Plan:
    """Long answers, whose decode workers are killed or drain in mid-stream; the first one of the pool stays."""
    may_go = [name for name in plan.workers if name.startswith("decode") and not name.endswith("-0")]
    faults = [_fault(rng, LOSSES, may_go) for _ in range(rng.randint(6, 16) if may_go else 0)]
    longer = tuple(_with_room(request, rng.randint(20, 120)) for request in plan.requests)
    brief = tuple(replace(fault, for_s=min(fault.for_s, 2.0)) for fault in faults)
    return replace(plan, requests=longer, faults=brief)


def _with_hand_overs(rng: Random, plan: Plan) -> Plan:
    """Long answers, whose decode workers drain in mid-stream. Half of the time they are slow, which is when most are
    handed over, and pulls among them are slow too or stand still."""
    decoders = [name for name in plan.workers if name.startswith("decode")]
    if len(decoders) < 2:
        return plan
    drains = [replace(_fault(rng, ("drain",), decoders[1:]), for_s=round(rng.uniform(0.3, 2), 3)) for _ in range(12)]
    longer = tuple(_with_room(request, rng.randint(20, 120)) for request in plan.requests)
    plan = replace(plan, requests=longer, faults=tuple(drains))
    if rng.random() < 0.5:
        return plan
    slow = [Fault("slow_engine", 0.0, HEALED_S, name, 10.0) for name in decoders]
    links = [
        replace(_fault(rng, ("freeze_pulls", "slow_pulls"), plan.workers), target="|".join(rng.sample(decoders, 2)))
        for _ in range(3)
    ]
    return replace(plan, faults=(*drains, *slow, *links))


def _with_room(request: Request, max_tokens: int) -> Request:
    """As long an answer as the model has room for."""
    return replace(request, max_tokens=max(1, min(max_tokens, MODEL_TOKENS - request.most_prompt_tokens)))


def _with_routers_lost(rng: Random, plan: Plan) -> Plan:
    """Long answers, and the second of two routers is killed under them; often workers are as well, or nothing else."""
    faults = [
        Fault("kill_router", round(rng.uniform(0, ACTIVE_S), 3), round(rng.uniform(0.05, 3), 3), f"{ROUTER}-1")
        for _ in range(rng.randint(1, 6))
    ]
    lossy = _with_losses_alone(rng, plan)
    others = rng.choice((plan.faults, lossy.faults, ()))
    return replace(lossy, faults=(*others, *faults), router_count=2)


def _requests(rng: Random, theme: Sequence[str], count: int) -> list[Request]:
    families, variants = rng.randint(1, 4), rng.choice((2, 6, 1000))
    salts: tuple[str, ...] = rng.choice((("",), ("", "a"), ("a", "b", "c")))
    shared: tuple[int, ...] = (0, 8, 16, 32, 33, 48)
    own: tuple[int, ...] = (*range(1, 40), *([30] * 40))
    if theme is HANDOFFS:
        # Equal prompts, so that what one has cached wrongly is found by the next.
        families, variants, salts, shared, own = 1, 8, ("",), (32,), (30,)
    at_s, requests = 0.0, []
    for number in range(count):
        at_s += rng.expovariate(count / ACTIVE_S) if rng.random() < 0.7 else 0.0
        moves = _moves(rng) if rng.random() < 0.35 else ("APPEND", ())
        request = Request(
            number=number,
            at_s=round(min(at_s, ACTIVE_S), 3),
            family=rng.randrange(families),
            shared_tokens=rng.choice(shared),
            own_tokens=rng.choice(own),
            variant=rng.randrange(variants),
            max_tokens=rng.choice((1, 2, 5, 12, 24, 60)),
            salt=rng.choice(salts),
            seed=rng.choice((None, rng.randrange(100))),
            timeout_s=rng.choice((None, None, None, _some_s(rng, 8))),
            cancel_s=_some_s(rng, 3) if rng.random() < 0.15 else None,
            mode=moves[0],
            moves=moves[1],
        )
        requests.append(request)
    return requests


def _some_s(rng: Random, most_s: float) -> float:
    """Often about as long as an answer takes."""
    return round(rng.uniform(0.02, rng.choice((0.3, most_s))), 3)


def _moves(rng: Random) -> tuple[str, tuple[Move, ...]]:
    mode = rng.choice(("APPEND", "UPDATE"))
    moves, length = [], 0
    for _ in range(rng.randint(0, 6)):
        after_s = round(rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 1))), 3)
        tokens = rng.choice((1, 3, 8, 16))
        if mode == "UPDATE" and rng.random() < 0.5:
            keep = rng.randint(0, length)
            moves.append(Move("update", after_s, tokens, keep))
            length = keep + tokens
        else:
            moves.append(Move("append", after_s, tokens))
            length += tokens
    last = rng.choice(("finish",) * 8 + ("cancel", "close"))
    return mode, (*moves, Move(last, round(rng.uniform(0, 0.5), 3)))


def _fault(rng: Random, kinds: Sequence[str], workers: Sequence[str]) -> Fault:
    kind = rng.choice(kinds)
    at_s = round(rng.uniform(0, ACTIVE_S), 3)
    for_s = round(rng.choice((rng.uniform(0.05, 1), rng.uniform(1, 6), rng.uniform(6, HEALED_S - at_s))), 3)
    target, value = FAULTS[kind](rng, workers)
    return Fault(kind, at_s, min(for_s, round(HEALED_S - at_s, 3)), target, value)


def _worker(rng: Random, workers: Sequence[str], value: float = 0.0) -> tuple[str, float]:
    return rng.choice(workers), value


def _link(rng: Random, workers: Sequence[str], value: float = 0.0) -> tuple[str, float]:
    """Most links are the router's; pulls go between workers."""
    one = _often_decode(rng, workers)
    others = [each for each in workers if each.partition("-")[0] != one.partition("-")[0]]
    return f"{one}|{rng.choice((ROUTER, ROUTER, rng.choice(others)))}", value


def _router_link(rng: Random, workers: Sequence[str], value: float) -> tuple[str, float]:
    return f"{_often_decode(rng, workers)}|{ROUTER}", value


def _often_decode(rng: Random, workers: Sequence[str]) -> str:
    return rng.choice(rng.choice((workers, [each for each in workers if each.startswith("decode")])))


def _pull_link(rng: Random, workers: Sequence[str], value: float = 0.0) -> tuple[str, float]:
    pools = [[each for each in workers if each.startswith(pool)] for pool in ("prefill", "decode")]
    return "|".join(rng.choice(pool) for pool in pools), value


def _registry_link(rng: Random, workers: Sequence[str]) -> tuple[str, float]:
    return f"{rng.choice((*workers, ROUTER))}|{REDIS}", 0.0


_Target = Callable[[Random, Sequence[str]], tuple[str, float]]

# What can go wrong, and what it hits:
#   kill          the worker is gone without a word, and starts again at the end
#   drain         the worker takes no new requests until the end
#   stall         the engine hangs in its step
#   slow_engine   steps take `value` times as long
#   slow_link     messages and pulls take `value` times as long
#   slow_pulls    the same, between two workers
#   cut           nothing crosses the link
#   reset         the calls on the link break
#   half_open     the same, but only for their clients: their servers learn of it `value` seconds later
#   loss          with this share of messages their call breaks
#   repeat        this share of unary requests arrives twice
#   freeze        the worker's process stands still: its engine, and all that it says and hears
#   freeze_pulls  pulls between two workers stand still, and neither is told
#   kill_router   the router is gone without a word, and starts again at the end
#   poison        the prompt of the request with number `value` kills every engine that computes it
#   redis_down    Redis refuses connections
#   redis_empty   the same, and it has lost its data at the end
FAULTS: dict[str, _Target] = {
    "kill": _worker,
    "drain": _worker,
    "stall": _worker,
    "slow_engine": lambda rng, workers: _worker(rng, workers, rng.choice((10.0, 100.0))),
    "slow_link": lambda rng, workers: _link(rng, workers, rng.choice((10.0, 100.0, 1000.0))),
    "slow_pulls": lambda rng, workers: _pull_link(rng, workers, rng.choice((2.0, 5.0, 20.0))),
    "cut": _link,
    "cut_registry": _registry_link,
    "reset": _link,
    "half_open": lambda rng, workers: _router_link(rng, workers, round(rng.uniform(0, 20), 3)),
    "loss": lambda rng, workers: _link(rng, workers, rng.choice((0.02, 0.2))),
    "repeat": lambda rng, workers: _link(rng, workers, 0.5),
    "freeze": _worker,
    "freeze_pulls": _pull_link,
    "kill_router": lambda rng, workers: (ROUTER, 0.0),
    "poison": lambda rng, workers: ("", 0.0),
    "redis_down": lambda rng, workers: ("", 0.0),
    "redis_empty": lambda rng, workers: ("", 0.0),
}


# Kinds of faults that come together.
_THEMES = (
    NOTHING,
    HANDOFFS,
    HANDOFFS,
    HANDOFFS,
    WORKERS,
    WORKERS,
    *([tuple(kind for kind in FAULTS if kind not in (*STALLS, *FREEZES, *POISON, *ROUTERS))] * 4),
)

# What a run may have besides, each in one run of eight, by the name that its seed is drawn with.
_SHARE_OF_EXTRAS = 0.125
ROUTERS_LOST = "routers lost"
EXTRAS: dict[str, Callable[[Random, Plan], Plan]] = {
    "stalls": lambda rng, plan: _with(rng, plan, STALLS),
    "freezes": lambda rng, plan: _with(rng, plan, FREEZES),
    "poison": _with_poison,
    "slow readers": _with_slow_readers,
    "stalls alone": _with_stalls_alone,
    "losses alone": _with_losses_alone,
    "hand-overs": _with_hand_overs,
    ROUTERS_LOST: _with_routers_lost,
}
