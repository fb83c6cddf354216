"""Checks of the configuration: mechanisms that are asked for and cannot fire. Pure.

What is refused at the start of a service does not come this far. Of what is on by default nothing is said unless
somebody has set it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import DecodeWeights, PoolSection, PrefillWeights
from command_line.doctor.findings import Fault, Verdicts
from command_line.doctor.seen import Seen

_LEARNING = ("bandit", "q_learning")


@dataclass(frozen=True, slots=True)
class Rule:
    """key: asks for a mechanism. cannot_fire: that is in vain. sentence: why, behind the key and its value."""

    key: str
    cannot_fire: Callable[[Seen], bool]
    sentence: str


def _longest(seen: Seen) -> int:
    """Tokens that a prompt may have, as workers say, or else the configuration."""
    said = [view.registration.model.max_model_len for view in seen.workers if view.registration.HasField("model")]
    return min(said, default=seen.config.engine.max_model_len)


def _has_host_memory(seen: Seen) -> bool:
    tiers = seen.config.tiers
    return bool(tiers.host_gib if tiers.host_ratio is None else tiers.host_ratio)


def _batch_of_one(seen: Seen) -> bool:
    places = [view.registration.max_running_requests for view in seen.of_pool(wire.POOL_DECODE)]
    most = max(places, default=0) or seen.config.engine.max_running_requests
    return seen.config.decode.policy != "fcfs" and most == 1


def _is_alone(seen: Seen) -> bool:
    return max(map(_most_workers, seen.config.pools.in_use.values())) <= 1


def _most_workers(pool: PoolSection) -> int:
    return max(pool.workers, pool.autoscale.max_workers if pool.autoscale.enabled else 0)


def _cannot_scale(pool: PoolSection) -> bool:
    return pool.autoscale.enabled and pool.autoscale.min_workers == pool.autoscale.max_workers


def _one_step_is_too_long(seen: Seen) -> bool:
    """Of somebody who decodes one request alone, as its worker has measured."""
    costs = [view.registration.costs for view in seen.of_pool(wire.POOL_DECODE)]
    measured_s = [each.decode_s + each.decode_s_per_request for each in costs]
    return 0 < seen.config.objectives.tpot_s < min(filter(None, measured_s), default=0.0)


def _is_not_asked(weight: str) -> Callable[[Seen], bool]:
    return lambda seen: seen.is_set(weight) and seen.config.placement_policy != "hotness"


_WEIGHTS = (
    *(f"placement.prefill_weights.{term}" for term in PrefillWeights.model_fields),
    *(f"placement.decode_weights.{term}" for term in DecodeWeights.model_fields),
)

RULES = (
    *(Rule(key, _is_not_asked(key), "weighs a term that placement.policy hotness alone has") for key in _WEIGHTS),
    Rule(
        "objectives.tpot_s",
        _one_step_is_too_long,
        "is less than a step that decodes one request takes on any worker: nobody keeps it, and prompts wait for it",
    ),
    Rule(
        "placement.disaggregation",
        lambda seen: (
            seen.config.placement.disaggregation == "always"
            and (seen.config.placement_policy == "objectives" or not seen.config.pools.shared.workers)
            and not _most_workers(seen.config.pools.prefill)
        ),
        "needs prefill workers, and pools.prefill.workers is 0; of workers that do both, a policy that asks for it",
    ),
    Rule(
        "placement.by_objectives.prefill_heavy",
        lambda seen: (
            seen.is_set("placement.by_objectives.prefill_heavy") and seen.config.placement_policy != "objectives"
        ),
        "is asked by placement.policy objectives alone",
    ),
    Rule("decode.policy", _batch_of_one, "chooses who decodes together, and workers decode one request at a time"),
    Rule(
        "decode.policy_folder",
        lambda seen: seen.config.decode.policy_folder is not None and seen.config.decode.policy not in _LEARNING,
        "keeps what a policy learns, and decode.policy is none that learns",
    ),
    Rule(
        "decode.chunk_tokens",
        lambda seen: seen.config.decode.policy != "fcfs" and seen.config.decode.chunk_tokens > _longest(seen),
        "is more than a prompt may have: no prefix is ever found to be shared",
    ),
    Rule(
        "index.chunk_tokens",
        lambda seen: seen.config.index.chunk_tokens > _longest(seen),
        "is more than a prompt may have: no prefix is ever found, and requests are placed by load alone",
    ),
    Rule(
        "placement.replication",
        lambda seen: seen.config.placement.replication and seen.is_set("placement.replication") and _is_alone(seen),
        "copies hot prefixes to further workers, and no pool has two",
    ),
    Rule(
        "placement.replication_load",
        lambda seen: seen.is_set("placement.replication_load") and seen.config.placement_policy != "hotness",
        "bounds what a hot prefix may ask for, and only placement.policy hotness copies any",
    ),
    Rule(
        "streaming.preemption",
        lambda seen: seen.config.streaming.preemption == "swap" and not _has_host_memory(seen),
        "needs host memory, and tiers.host_gib gives none: what is preempted is computed again",
    ),
    Rule(
        "tiers.admission",
        lambda seen: (
            seen.is_set("tiers.admission") and seen.config.tiers.admission != "none" and not _has_host_memory(seen)
        ),
        "says what is copied to host memory, and tiers.host_gib gives none",
    ),
    Rule(
        "tiers.promotion",
        lambda seen: (
            seen.config.tiers.promotion
            and seen.is_set("tiers.promotion")
            and (seen.config.tiers.admission == "none" or not _has_host_memory(seen))
        ),
        "brings prefixes back from host memory, where none come to be",
    ),
    Rule(
        "pools.prefill.autoscale.enabled",
        lambda seen: _cannot_scale(seen.config.pools.prefill),
        "has no room: min_workers is max_workers",
    ),
    Rule(
        "pools.decode.autoscale.enabled",
        lambda seen: _cannot_scale(seen.config.pools.decode),
        "has no room: min_workers is max_workers",
    ),
    Rule(
        "pools.shared.autoscale.enabled",
        lambda seen: _cannot_scale(seen.config.pools.shared),
        "has no room: min_workers is max_workers",
    ),
    Rule(
        "redis.refresh_s",
        lambda seen: seen.config.redis.refresh_s >= seen.config.redis.worker_lease_s,
        "is not below redis.worker_lease_s: the router finds workers gone only long after their leases",
    ),
    Rule(
        "router.tenant_share",
        lambda seen: seen.config.router.tenant_share < 1 and not seen.config.security.knows_callers,
        "divides the router between tenants, and without API keys there is one",
    ),
    Rule(
        "tracing.sample_rate",
        lambda seen: seen.is_set("tracing.sample_rate") and seen.config.tracing.otlp_endpoint is None,
        "says how many traces are exported, and without tracing.otlp_endpoint none are",
    ),
)


def mechanisms(seen: Seen) -> Verdicts:
    for rule in RULES:
        if rule.cannot_fire(seen):
            yield Fault(rule.key, f"{rule.key} is {_value(seen, rule.key)}: it {rule.sentence}")


def _value(seen: Seen, key: str) -> str:
    found: object = seen.config
    for name in key.split("."):
        found = getattr(found, name)
    return str(found).lower() if isinstance(found, bool) else str(found)
