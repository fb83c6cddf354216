"""A simulated cluster whose times can be reckoned by hand."""

from dataclasses import dataclass

from cluster_sim.costs.step_work import StepWork
from cluster_sim.reports.figures import Figures
from cluster_sim.workloads.requests import SimRequest
from cluster_sim.world import World

BLOCK = 10


@dataclass(frozen=True, slots=True)
class Costs:
    """A millisecond for each prompt token, ten for a step that decodes; a kilobyte a token, a megabyte a second."""

    name: str = "by hand"
    gpus: int = 2
    gpu_dollars_per_hour: float = 3.0
    kv_bytes_per_token: int = 1000
    device_tokens: int = 1000
    host_tokens: int = 0
    network_bytes_per_s: float = 1e6
    network_latency_s: float = 0.003

    def step_s(self, work: StepWork) -> float:
        return 0.001 * work.prefill_tokens + 0.01 * (work.decode_requests > 0)

    def load_s(self, tokens: int) -> float:
        return 0.0001 * tokens

    def store_s(self, tokens: int) -> float:
        return 0.0001 * tokens


def run(made: World, *requests: SimRequest) -> Figures:
    figures = made.run(requests)
    made.check_invariants()
    return figures
