"""Which fault hits what and when in a run of `rachis chaos`: drawn from a seed. Pure.

freeze   SIGSTOP, and SIGCONT some seconds later: a host that pauses, a debugger, a kernel that thrashes
kill     SIGKILL: memory, a crash; what starts it again is what does so in production. `service` is `rachis serve`, and
         Redis's primary has a replica
flush    Redis loses its data and goes on
"""

import random
from dataclasses import dataclass

# Targets of each kind, each as often as it stands there.
_TARGETS = {
    "freeze": ("prefill", "decode", "prefill", "decode", "router", "service", "redis"),
    "kill": ("prefill", "decode", "prefill", "decode", "router", "service", "redis"),
    "flush": ("redis",),
}
_KINDS = ("freeze", "freeze", "freeze", "kill", "kill", "flush")
_FIRST_S = 5.0
_BETWEEN_S = (5.0, 9.0)
# What is healed before the end, so that all is quiet when it is looked for leaks.
_QUIET_S = 40.0
_FREEZE_S = {
    "prefill": (1.0, 10.0),
    "decode": (1.0, 10.0),
    "router": (0.5, 12.0),
    "service": (0.5, 2.0),
    "redis": (1.0, 8.0),
}
# What was killed takes so long to come back; meanwhile its pool loses no other, and of two routers one is left.
_PAUSE_AFTER_KILL_S = {"prefill": 45.0, "decode": 45.0, "router": 45.0, "service": 45.0, "redis": 20.0}
_ROUTERS = ("router", "service")


@dataclass(frozen=True, slots=True)
class Fault:
    """number: which of the workers of a pool."""

    at_s: float
    kind: str
    target: str
    number: int = 0
    for_s: float = 0.0


def schedule(duration_s: float, seed: int) -> list[Fault]:
    """Faults one after the other, in order."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    spared_until_s = dict.fromkeys(_PAUSE_AFTER_KILL_S, 0.0)
    now_s = _FIRST_S
    while now_s < duration_s - _QUIET_S:
        kind = rng.choice(_KINDS)
        target, number = rng.choice(_TARGETS[kind]), rng.randrange(2)
        length_s = rng.uniform(*_FREEZE_S[target]) if kind == "freeze" else 0.0
        if kind != "kill" or now_s >= spared_until_s[target]:
            faults.append(Fault(round(now_s, 2), kind, target, number, round(length_s, 2)))
            if kind == "kill":
                for each in _ROUTERS if target in _ROUTERS else (target,):
                    spared_until_s[each] = now_s + _PAUSE_AFTER_KILL_S[target]
        now_s += rng.uniform(*_BETWEEN_S) + length_s
    return faults
