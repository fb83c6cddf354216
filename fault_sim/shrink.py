"""Makes a plan that breaks an invariant small: what can be left out while the same one breaks is left out.

Source: delta debugging, Zeller and Hildebrandt, 2002 (ddmin, complements only).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from fault_sim.plan import Plan

_Item = TypeVar("_Item")


def shrunk(plan: Plan, still_fails: Callable[[Plan], bool], at_most: int = 400) -> Plan:
    """`still_fails` is called so often at most. First the faults, then the requests, then once more the faults."""
    budget = [at_most]

    def fails(candidate: Plan) -> bool:
        budget[0] -= 1
        return budget[0] >= 0 and still_fails(candidate)

    for _ in range(2):
        plan = _with_fewer_faults(plan, fails)
        plan = _with_fewer_requests(plan, fails)
    return plan


def _with_fewer_faults(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    faults = _smaller(plan.faults, lambda rest: fails(replace(plan, faults=tuple(rest))))
    return replace(plan, faults=tuple(faults))


def _with_fewer_requests(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    requests = _smaller(plan.requests, lambda rest: fails(replace(plan, requests=tuple(rest))))
    return replace(plan, requests=tuple(requests))


def _smaller(items: Sequence[_Item], fails: Callable[[Sequence[_Item]], bool]) -> Sequence[_Item]:
    size = len(items)
    while size and items:
        start = 0
        while start < len(items):
            rest = [*items[:start], *items[start + size :]]
            if fails(rest):
                items = rest
            else:
                start += size
        size //= 2
    return items
