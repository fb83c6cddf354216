"""Starvation in random traffic: no policy holds a request beyond the bound, and without the bound one would."""

import random

import pytest

from decode_worker.batch_members import Reason
from decode_worker.batching import Batching
from decode_worker.stop_policies import POLICIES, PolicySettings
from decode_worker.turns import Turns
from tests.examples import seeds
from tests.planting import planted
from tests.pure.decode_worker.batch_steps import BOUND_S, hashes_of


def longest_hold_s(policy: str, seed: int) -> float:
    """Random traffic, everybody admitted who is planned: the longest time that a request was held while places were
    free in every plan, or until one was. Raises AssertionError when somebody never comes."""
    rng = random.Random(seed)
    step_s, places = 0.05, rng.choice((2, 8, 32))
    stop = POLICIES[policy](PolicySettings(), random.Random(seed))
    batching = Batching(stop, BOUND_S, lambda chunk: rng.random() < 0.8)
    prefixes = [tuple(rng.randrange(9) for _ in range(rng.randint(1, 30))) for _ in range(rng.randint(1, 12))]
    # Nearly all share one prefix, so that there always is somebody better.
    weights = [50.0, *[1.0] * (len(prefixes) - 1)]
    ends: dict[str, float] = {}
    pulled: dict[str, float] = {}
    free_since: dict[str, float] = {}
    longest_s, load = 0.0, rng.choice((0.5, 1.0, 1.5))
    for turn in range(1200):
        now_s = turn * step_s
        for name in [name for name, at_s in ends.items() if at_s <= now_s]:
            del ends[name]
            assert batching.gone(name)
        for name in [name for name, at_s in pulled.items() if at_s <= now_s or name not in ends]:
            del pulled[name]
            batching.loaded(name)
        if ends and rng.random() < 0.02:
            name = rng.choice(sorted(ends))
            del ends[name]
            batching.preempted(name, now_s)
        while rng.random() < min(0.9, load * places * step_s):
            prompt = rng.choices(prefixes, weights)[0] + (turn,)
            batching.insert(f"{turn}.{rng.random()}", hashes_of(prompt), now_s)
        free = places - len(ends)
        before = {member.request_id: member for member in batching.waiting()}
        plan = batching.plan(now_s, free)
        batching.settle(plan, plan.request_ids, [name for name in plan.request_ids if rng.random() < 0.3], now_s)
        pulled.update(dict.fromkeys(batching.loading(), now_s + 0.3))
        stop.learn(plan.decisions(plan.request_ids), 100.0 + rng.random(), None)
        for name in plan.request_ids:
            ends[name] = now_s + rng.uniform(0.05, 1.5)
            free_since.pop(name, None)
        # Held for too long is who is due while a place stays free, or is passed over by somebody who is not.
        late = [member for name, member in before.items() if batching.waits(name) and member.due_s <= now_s]
        if late and len(plan.joining) < free:
            longest_s = max(longest_s, max(now_s - member.turn_s for member in late))
        assert not late or all(each.reason is Reason.OVERDUE for each in plan.joining), "the overdue are passed over"
        for each in plan.joining:
            if each.reason is not Reason.OVERDUE:
                longest_s = max(longest_s, now_s - each.member.turn_s)
    return longest_s


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_held_beyond_the_bound_while_places_are_free(policy: str) -> None:
    assert max(longest_hold_s(policy, seed) for seed in seeds(6, few=2)) <= BOUND_S


def test_without_the_bound_somebody_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, Turns, "overdue", lambda self, now_s, planned: None)
    planted(monkeypatch, Batching, "_held_too_long", lambda self, priority, now_s: None)
    with pytest.raises(AssertionError):
        assert max(longest_hold_s("heuristic", seed) for seed in seeds(6, few=2)) <= BOUND_S
