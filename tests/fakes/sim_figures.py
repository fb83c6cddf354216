"""Made-up figures of simulated runs."""

import random

from cluster_sim.reports.figures import Figures


def run(name: str, ttft_scale: float = 1.0, *, seed: int = 0, requests: int = 300) -> Figures:
    rng = random.Random(seed)
    figures = Figures(name, {"prefill": 2, "decode": 1}, 3, 2.5, slo_ttft_s=0.5, slo_tpot_s=0.05)
    figures.outcomes = {"finished": requests - 2, "refused": 2}
    figures.duration_s = 100.0
    figures.busy_s = {"prefill": 150.0, "decode": 50.0}
    figures.imbalance = {"prefill": 1.25, "decode": 1.0}
    figures.prompt_tokens, figures.device_hit_tokens, figures.host_hit_tokens = 1000 * requests, 400 * requests, 0
    figures.measured, figures.attained = requests, requests // 2
    for number in range(requests):
        at_s = number / 3
        ttft_s = ttft_scale * rng.lognormvariate(-1, 1)
        figures.arrivals.add(at_s, 1)
        figures.completions.add(at_s + ttft_s + 2, 1)
        figures.throughput.add(at_s + ttft_s, 50)
        figures.steps.add(at_s + ttft_s, 5)
        figures.prompts.add(at_s, 1000)
        figures.hits.add(at_s, 400)
        figures.generated_tokens += 50
        figures.ttft_s.add(ttft_s)
        figures.tpot_s.add(rng.uniform(0.01, 0.03))
    return figures
