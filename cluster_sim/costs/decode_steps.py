"""What steps that only decode cost by a cost model, as the router is told it: as a line in requests and in context."""

from cluster_sim.costs.step_work import CostModel, StepWork
from control_plane.placement.both_view import DecodeCosts

_TOKENS = 1e6


def decode_costs(model: CostModel, most_requests: int) -> DecodeCosts:
    """most_requests: of a batch; between it and one request the line is exact at both ends."""

    def seconds(requests: int, tokens: float) -> float:
        return model.step_s(StepWork(0, 0.0, requests, tokens, tokens))

    one_s, most_s = seconds(1, 0.0), seconds(max(2, most_requests), 0.0)
    s_per_request = (most_s - one_s) / (max(2, most_requests) - 1)
    return DecodeCosts(one_s - s_per_request, s_per_request, (seconds(1, _TOKENS) - one_s) / _TOKENS)
