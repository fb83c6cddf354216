"""How often the pools of a service are looked at, and how long what they wait for may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolTiming:
    """Other values are for tests: none of this is configured."""

    # Between two looks at the registry, and at a worker that drains.
    look_every_s: float = 0.2
    # Between two questions to Ray, and how long its last answer is believed.
    ask_ray_every_s: float = 2.0
    believe_ray_s: float = 10.0
    # How long a node may take to have room for the worker that stands in for the only one of its pool.
    stand_in_room_s: float = 10.0
    # Between two samples of the load that a pool follows.
    sample_every_s: float = 1.0


POOL_TIMING = PoolTiming()
