"""The placer that a configuration asks for."""

import random
from collections.abc import Callable
from functools import partial

from cluster_configs.schema import RachisConfig
from control_plane.fleet.membership import Membership
from control_plane.placement.by_objective import Objectives
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.objective_placer import OBJECTIVES, BothRules, ObjectivePlacer
from control_plane.placement.placer import Placer


def configured_placer(
    config: RachisConfig,
    service_id: str,
    membership: Membership,
    index: IndexPorts,
    rng: Callable[[int], random.Random],
    now_s: Callable[[], float],
) -> Placer:
    """rng: by the configured seed."""
    make: Callable[..., Placer] = Placer
    if config.placement_policy == OBJECTIVES:
        objectives, section = config.objectives, config.placement.by_objectives
        keeps = Objectives(objectives.ttft_s, objectives.tpot_s)
        rules = BothRules(
            keeps, None, section.prefill_heavy, section.refuses, objectives.best_effort.ttft_s,
            least_tokens=config.engine.block_size_tokens, step_tokens=config.engine.max_batched_tokens,
        )  # fmt: skip
        make = partial(ObjectivePlacer, rules)
    return make(
        membership,
        index,
        config.placement,
        service_id=service_id,
        chunk_tokens=config.chunk_blocks * config.engine.block_size_tokens,
        rng=rng(config.placement.seed),
        now_s=now_s,
    )
