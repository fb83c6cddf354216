"""The simulated cluster under drawn faults: everything is given back, and planted bugs are seen."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cluster_configs.schema import PlacementSection
from cluster_core.engine_jobs import SessionMode
from cluster_sim import dispatch
from cluster_sim.engines.engine import SimInput
from cluster_sim.engines.light_chunk_bound import ChunkBound
from cluster_sim.engines.light_engine import LightEngine, LightEngineSettings
from cluster_sim.reports.figures import Figures, as_json
from cluster_sim.request import Attempt
from cluster_sim.request_figures import RequestFigures
from cluster_sim.worker import PoolSettings, SimWorker
from cluster_sim.workloads.opening import open_workload
from cluster_sim.workloads.requests import SimRequest
from cluster_sim.workloads.section import WorkloadSection
from cluster_sim.world import Fault, World, WorldSettings
from control_plane.fleet.loads import Loads
from control_plane.placement import by_objective, deflection, length_aware
from control_plane.placement.both_view import DecodeCosts
from control_plane.placement.by_objective import Objectives
from control_plane.placement.objective_placer import BothRules, ObjectivePlacer
from tests.examples import seeds
from tests.fakes.sim_world import BLOCK, Costs, run
from tests.planting import planted


def drawn(seed: int) -> tuple[World, Sequence[SimRequest]]:
    """A cluster, its faults and its requests, all from the seed."""
    rng, costs = random.Random(seed), Costs()
    sizes = {"prefill": rng.randrange(4), "decode": rng.randrange(1, 4)}
    names = [f"{pool}-{number:04}" for pool, size in sizes.items() for number in range(size)]
    faults = [
        Fault(
            rng.uniform(0, 20), rng.choice(("kill", "kill", "slow", "link")), rng.choice(names),
            rng.uniform(0.5, 10), rng.choice((2.0, 10.0, 100.0)),
        )
        for _ in range(rng.randrange(1, 8))
    ]  # fmt: skip
    section = WorkloadSection(
        kind=rng.choice(("prefix_groups", "prefix_tree")), requests=80, requests_per_s=6, shared_tokens=200,
        own_tokens=100, output_tokens=30, block_tokens=BLOCK, tenants=rng.choice((1, 3)),
    )  # fmt: skip
    settings = LightEngineSettings(
        BLOCK, rng.choice((60, 200)), rng.choice((0, 50)), max_running_requests=rng.choice((2, 8, 256)),
        max_batched_tokens=rng.choice((64, 8192)),
    )  # fmt: skip
    placement = PlacementSection(
        policy=rng.choice(("hotness", "round_robin", "cost_formula")),
        disaggregation=rng.choice(("always", "conditional")),
    )
    pools = {name: PoolSettings(size, costs, lambda: LightEngine(costs, settings)) for name, size in sizes.items()}
    made = World(str(seed), WorldSettings(pools, BLOCK, placement, faults=faults, index_entries=1 << 14))
    return made, [_as_session(rng, each) if rng.random() < 0.3 else each for each in open_workload(section, seed)]


def drawn_both(seed: int) -> tuple[World, Sequence[SimRequest]]:
    """Workers that do both, placed on by objectives: prompts prefilled apart, bound late, refused; under faults."""
    rng, costs = random.Random(seed), Costs()
    size = rng.randrange(1, 6)
    faults = [
        Fault(
            rng.uniform(0, 20), rng.choice(("kill", "kill", "slow", "link")), f"decode-{rng.randrange(size):04}",
            rng.uniform(0.5, 10), rng.choice((2.0, 10.0, 100.0)),
        )
        for _ in range(rng.randrange(1, 8))
    ]  # fmt: skip
    section = WorkloadSection(
        kind=rng.choice(("prefix_groups", "prefix_tree")), requests=80, requests_per_s=rng.choice((2, 6)),
        shared_tokens=200, own_tokens=100, output_tokens=30, block_tokens=BLOCK, tenants=rng.choice((1, 3)),
    )  # fmt: skip
    objectives = Objectives(rng.choice((0.3, 2.0, 60.0)), rng.choice((0.02, 0.05)))
    bound = ChunkBound(objectives.tpot_s, objectives.ttft_s, least_tokens=rng.choice((1, 16)))
    settings = LightEngineSettings(
        BLOCK, rng.choice((60, 200)), rng.choice((0, 50)), max_running_requests=rng.choice((2, 8, 256)),
        max_batched_tokens=rng.choice((64, 8192)), chunk_bound=rng.choice((bound, None)),
        pulled_first=rng.random() < 0.7,
    )  # fmt: skip
    choices = rng.choice((by_objective.choices, by_objective.choices, deflection.choices, length_aware.choices))
    rules = BothRules(
        objectives, DecodeCosts(0.01, 0.0, 0.0), rng.choice((0.0, 0.3)), refuses=rng.random() < 0.7, choices=choices
    )
    pools = {"decode": PoolSettings(size, costs, lambda: LightEngine(costs, settings))}
    made = World(str(seed), WorldSettings(pools, BLOCK, faults=faults, index_entries=1 << 14, both=rules))
    return made, [_as_session(rng, each) if rng.random() < 0.3 else each for each in open_workload(section, seed)]


def _as_session(rng: random.Random, whole: SimRequest) -> SimRequest:
    """The same prompt in pieces, some of which replace what was there."""
    after_s, length, inputs = 0.0, 0, []
    for number in range(pieces := rng.randrange(1, 6)):
        is_last, before = number == pieces - 1, length
        length = whole.prompt_tokens if is_last else rng.randrange(1, whole.prompt_tokens + 20)
        replaces = length < before or rng.random() < 0.3
        kept = rng.randrange(min(before, length) + 1) if replaces else before
        tokens = [number] * (length if replaces else length - before)
        keys = whole.keys[: length // BLOCK]
        inputs.append((after_s, SimInput(tokens, length, kept, keys, replaces, is_last)))
        after_s += rng.expovariate(2)
    return replace(whole, inputs=tuple(inputs), mode=SessionMode.UPDATE)


Drawing = Callable[[int], tuple[World, Sequence[SimRequest]]]


def check(seed: int, drawing: Drawing = drawn) -> tuple[World, Figures]:
    made, requests = drawing(seed)
    figures = run(made, *requests)
    assert figures.requests == len(requests)
    assert "expired" not in figures.outcomes, "somebody was forgotten"
    return made, figures


def test_under_faults_every_request_has_one_outcome_and_nothing_is_left() -> None:
    told: Counter[str] = Counter()
    for seed in (runs := seeds(100, few=8)):
        _, figures = check(seed)
        told.update({**figures.outcomes, "retries": figures.retries})
    assert told["finished"] > 60 * len(runs)
    assert told["failed"] > 0
    assert told["retries"] > 4 * len(runs)


def test_workers_that_do_both_give_everything_back_whichever_way_requests_go() -> None:
    told: Counter[str] = Counter()
    for seed in (runs := seeds(100, few=12)):
        made, figures = check(seed, drawn_both)
        assert isinstance(made.placer, ObjectivePlacer)
        decided = made.placer.counts
        assert figures.outcomes.get("refused", 0) >= decided.refused.total()
        told.update({**figures.outcomes, "retries": figures.retries, "elsewhere": decided.bound_elsewhere})
        told.update({f"way {way}": number for way, number in decided.ways.items()})
        told.update({"stayed": decided.bound - decided.bound_elsewhere, "overload": decided.refused.total()})
    assert told["finished"] > 20 * len(runs)
    for way in ("way whole", "way append", "way apart", "elsewhere", "stayed", "overload", "retries"):
        assert told[way], (way, told)


PLANTS: dict[str, tuple[object, str, object, Drawing]] = {
    "the prefill worker keeps what was pulled": (SimWorker, "release", lambda self, number: None, drawn),
    "who is aborted goes on": (LightEngine, "abort", lambda self, number, now_s: None, drawn),
    "in-flight counts are not given back": (Attempt, "end", lambda self: None, drawn),
    "who is lost is not told": (dispatch.SimDispatcher, "lost", lambda self, worker: None, drawn),
    "who stays where it was prefilled keeps its lease": (SimWorker, "release", lambda self, number: None, drawn_both),
    "a prefill that is over still counts as one": (Loads, "prefilled", lambda self, *given: None, drawn_both),
    "who is refused stays open": (RequestFigures, "ended", lambda self, run, now_s: None, drawn_both),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_noticed(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, drawing = PLANTS[plant]
    planted(monkeypatch, owner, name, broken)
    with pytest.raises(AssertionError):
        for seed in range(25):
            check(seed, drawing)


def test_the_same_seed_gives_the_same_bytes() -> None:
    def bytes_of(seed: int) -> str:
        made, requests = drawn(seed)
        return json.dumps(as_json(run(made, *requests), curves=True))

    assert bytes_of(3) == bytes_of(3)
    assert bytes_of(3) != bytes_of(4)
