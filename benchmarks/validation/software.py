"""What the software of a service takes where nothing waits, and the scenario that simulates the service.

Both sides have the same cost model: what a request takes beside that, alone in the service, is the software's. The
scenario has the service's own configuration, and nothing in it comes from the workloads that are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.validation.cluster import PromptPoint
from cluster_configs.schema import RachisConfig
from cluster_sim.costs.step_work import CostModel, StepWork
from cluster_sim.scenario import PoolSection, PoolsSection, RouterSection, Scenario
from worker_runtime.registration import RENEWALS_PER_LEASE


@dataclass(frozen=True, slots=True)
class Software:
    """Seconds. hop_s: of one message between client, router and worker, with what both ends do for it. pull_s: of a
    pull, beside the transfer: what connector and engine do, and how long it takes them to notice its end."""

    hop_s: float
    pull_s: float


def hop_s_of(points: Sequence[PromptPoint]) -> float:
    """Half of what a first token takes beside the engine."""
    return max(0.0, median(each.ttft_s - each.prefill_s for each in points) / 2)


def software_of(points: Sequence[PromptPoint], costs: CostModel) -> Software:
    """points: of a service whose engines take the time of `costs`."""
    hop_s = hop_s_of(points)
    pulls = [each.gap_s - 2 * hop_s - _second_token_s(each.tokens, costs) for each in points]
    return Software(hop_s, max(0.0, median(pulls)))


def _second_token_s(tokens: int, costs: CostModel) -> float:
    """After the first: the transfer, and a step."""
    transfer_s = costs.network_latency_s + tokens * costs.kv_bytes_per_token / costs.network_bytes_per_s
    return transfer_s + costs.step_s(StepWork(0, 0.0, 1, tokens + 1, tokens + 1))


def scenario_of(config: RachisConfig, costs: CostModel, software: Software, seed: int = 0) -> Scenario:
    """seed: of placement, which chooses between equals."""
    engine, router = config.engine, config.router
    device_tokens = costs.device_tokens if engine.kv_blocks is None else engine.kv_blocks * engine.block_size_tokens
    if config.tiers.host_ratio is not None:
        host_tokens = int(device_tokens * config.tiers.host_ratio)
    else:
        host_tokens = int(config.tiers.host_gib * 2**30) // costs.kv_bytes_per_token
    pools = {
        name: PoolSection(
            workers=workers,
            max_running_requests=engine.max_running_requests,
            max_batched_tokens=engine.max_batched_tokens,
            device_tokens=device_tokens,
            host_tokens=host_tokens,
        )
        for name, workers in workers_of(config).items()
    }
    return Scenario(
        cost_model=engine.cost_model or costs.name,
        engine="vllm",
        pools=PoolsSection(**pools),
        placement=config.placement.model_copy(update={"seed": seed}),
        tiers=config.tiers,
        streaming=config.streaming,
        decode=config.decode,
        router=RouterSection(
            hop_ms=software.hop_s * 1000,
            pull_ms=software.pull_s * 1000,
            prefill_attempts=router.prefill_attempts,
            request_timeout_s=router.request_timeout_s,
            handoff_deadline_s=config.handoff.deadline_s,
            # Workers write when so much time has passed, routers read it at any time of theirs.
            event_delay_ms=(config.index.write_interval_s + config.index.refresh_s / 2) * 1000,
            report_s=config.redis.worker_lease_s / RENEWALS_PER_LEASE,
            worker_lease_s=config.redis.worker_lease_s,
        ),
    )


def workers_of(config: RachisConfig) -> dict[str, int]:
    return {"prefill": config.pools.prefill.workers, "decode": config.pools.decode.workers}
