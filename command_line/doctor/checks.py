"""All checks of `rachis doctor`, as one literal table: name, severity, the page that helps, what is looked at."""

from command_line.doctor import edge_checks, router_checks, setting_checks, use_checks, worker_checks
from command_line.doctor.findings import Check, Severity
from command_line.doctor.seen import Part

CRITICAL, WARNING, INFO = Severity


def _runbook(alert: str) -> str:
    return f"runbooks/{alert}.md"


CHECKS = (
    # Workers.
    Check("decode_pool", CRITICAL, _runbook("RachisPoolBelowMinimum"), worker_checks.decode_pool),
    Check("prefill_pool", CRITICAL, _runbook("RachisPoolBelowMinimum"), worker_checks.prefill_pool),
    Check("shared_pool", CRITICAL, _runbook("RachisPoolBelowMinimum"), worker_checks.shared_pool),
    Check("pool_size", CRITICAL, _runbook("RachisPoolBelowMinimum"), worker_checks.pool_sizes, (Part.POOLS,)),
    Check("worker_lost", WARNING, _runbook("RachisWorkerLost"), worker_checks.lost),
    Check("worker_hangs", WARNING, _runbook("RachisWorkerHangs"), worker_checks.hangs),
    Check("worker_drains", WARNING, "doctor.md#a-drained-worker", worker_checks.drains),
    Check("worker_versions", WARNING, _runbook("RachisVersionSkew"), worker_checks.versions),
    Check("command_version", INFO, _runbook("RachisVersionSkew"), worker_checks.command_version),
    Check("clocks", WARNING, _runbook("RachisClockSkew"), worker_checks.clocks),
    Check("models", CRITICAL, "doctor.md#workers-that-are-not-alike", worker_checks.models),
    Check("addresses", CRITICAL, "deploy.md#network", worker_checks.addresses, (Part.CONFIGURATION,)),
    Check("quarantine", WARNING, _runbook("RachisBlocksQuarantined"), worker_checks.quarantine),
    Check("host_memory", CRITICAL, _runbook("RachisHostMemoryFull"), worker_checks.host_memory),
    # The router and what it follows.
    Check("registry", CRITICAL, _runbook("RachisRegistryUnreachable"), router_checks.registry),
    Check(
        "redis_memory", WARNING, f"{_runbook('RachisRegistryUnreachable')}#redis-is-full", router_checks.redis_memory
    ),
    Check("overload", CRITICAL, _runbook("RachisRouterOverloaded"), router_checks.overload, (Part.CONFIGURATION,)),
    Check("queue", WARNING, _runbook("RachisQueueGrowing"), router_checks.queue),
    Check("poison", CRITICAL, _runbook("RachisPoisonedRequest"), router_checks.poison),
    Check("failures", CRITICAL, _runbook("RachisRequestsFailing"), router_checks.failures),
    Check(
        "ttft", WARNING, _runbook("RachisTtftObjectiveMissed"), router_checks.ttft, (Part.CONFIGURATION, Part.METRICS)
    ),
    Check("index_stale", WARNING, _runbook("RachisIndexStale"), router_checks.index_stale, (Part.INDEX,)),
    Check("index_away", WARNING, _runbook("RachisRegistryUnreachable"), router_checks.index_away, (Part.INDEX,)),
    Check("index_silent", WARNING, _runbook("RachisWorkerSilent"), router_checks.index_silent, (Part.INDEX,)),
    Check("index_sync", WARNING, _runbook("RachisWorkerNotInSync"), router_checks.index_sync, (Part.INDEX,)),
    Check("index_lag", WARNING, _runbook("RachisIndexLagging"), router_checks.index_lag, (Part.INDEX,)),
    Check("index_damaged", WARNING, _runbook("RachisIndexDamagedBatches"), router_checks.index_damaged, (Part.INDEX,)),
    Check("index_size", INFO, _runbook("RachisIndexTooSmall"), router_checks.index_size, (Part.INDEX,)),
    Check("index_claims", CRITICAL, _runbook("RachisIndexUntrueClaims"), router_checks.index_claims, (Part.CLAIMS,)),
    Check("index_unused", INFO, "doctor.md#prompts-too-short-to-be-found", router_checks.index_unused, (Part.INDEX,)),
    Check(
        "index_blocks", CRITICAL, "doctor.md#workers-that-are-not-alike", worker_checks.index_blocks,
        (Part.CONFIGURATION, Part.INDEX),
    ),
    # Whether it is used.
    Check("answers", CRITICAL, _runbook("RachisRequestsFailing"), use_checks.probes_answered, (Part.PROBES,)),
    Check("handoff", WARNING, _runbook("RachisHandoffFailures"), use_checks.handoff_pulled, (Part.PROBES,)),
    Check("handoffs_recomputed", WARNING, _runbook("RachisHandoffFailures"), use_checks.handoffs_recomputed),
    Check("handoffs_expired", WARNING, _runbook("RachisLeaseExpiries"), use_checks.handoffs_expired),
    Check("handoffs_mismatched", CRITICAL, _runbook("RachisHandoffMismatch"), use_checks.handoffs_mismatched),
    Check("handoffs_unused", INFO, "doctor.md#nothing-is-handed-off", use_checks.handoffs_unused, (Part.INDEX,)),
    Check(
        "handoff_deadline", WARNING, "doctor.md#pulls-longer-than-their-deadline", use_checks.handoff_deadline,
        (Part.CONFIGURATION,),
    ),
    Check("prefix_cache", WARNING, "doctor.md#prefix-caching-does-not-hit", use_checks.prefix_cache, (Part.PROBES,)),
    Check(
        "token_identity", CRITICAL, "doctor.md#other-tokens-than-a-worker-alone", use_checks.token_identity,
        (Part.WORKER_ALONE,),
    ),
    Check("host_tier", WARNING, "doctor.md#host-memory-without-room", use_checks.host_tier, (Part.CONFIGURATION,)),
    Check("features", INFO, "models.md", use_checks.features),
    Check("adapters", WARNING, "adapters.md", use_checks.adapters, (Part.CONFIGURATION, Part.ADAPTERS)),
    Check(
        "mechanisms", WARNING, "doctor.md#mechanisms-that-cannot-fire", setting_checks.mechanisms,
        (Part.CONFIGURATION,),
    ),
    # Where it meets its host and its callers.
    Check("exposure", WARNING, "access.md", edge_checks.exposure, (Part.CONFIGURATION,)),
    Check("encryption", WARNING, "access.md#encryption", edge_checks.encryption, (Part.CONFIGURATION,)),
    Check("certificate", CRITICAL, "access.md#encryption", edge_checks.certificate, (Part.CERTIFICATE,)),
    Check("gateway", WARNING, "doctor.md#http-does-not-answer", edge_checks.gateway, (Part.GATEWAY,)),
    Check("traces", WARNING, "tracing.md#to-a-collector", router_checks.traces, (Part.CONFIGURATION, Part.METRICS)),
    Check("disks", CRITICAL, "doctor.md#a-disk-is-almost-full", edge_checks.disks, (Part.DISKS,)),
)  # fmt: skip
