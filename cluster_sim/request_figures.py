"""What each simulated request adds to the figures of its run. Those that arrive while it warms up add counts only."""

from cluster_sim.reports.figures import Figures
from cluster_sim.request import RequestRun
from cluster_sim.workloads.requests import SimRequest
from control_plane.model.lifecycle import State


class RequestFigures:
    """Writes to `figures`. warm_up_s: requests that arrive before are not measured."""

    def __init__(self, figures: Figures, warm_up_s: float) -> None:
        self._figures = figures
        self._warm_up_s = warm_up_s

    def arrived(self, now_s: float, request: SimRequest) -> None:
        self._figures.arrivals.add(now_s, 1)
        self._figures.prompt_tokens += request.prompt_tokens

    def emitted(self, run: RequestRun, now_s: float) -> None:
        """A token has reached the client; the first one is measured."""
        if run.first_token_s is not None:
            return
        run.first_token_s = now_s
        if not self._is_measured(run):
            return
        self._figures.ttft_s.add(now_s - run.request.complete_s)
        if run.session is not None:
            self._figures.ttft_open_s.add(now_s - run.request.arrival_s)

    def ended(self, run: RequestRun, now_s: float) -> None:
        figures, state = self._figures, run.job.lifecycle.state
        figures.outcomes[state.value] = figures.outcomes.get(state.value, 0) + 1
        figures.completions.add(now_s, 1)
        figures.duration_s = now_s
        if not self._is_measured(run):
            return
        figures.measured += 1
        if state is not State.FINISHED or run.first_token_s is None:
            return
        request = run.request
        ttft_s = run.first_token_s - request.complete_s
        later = request.output_tokens - 1
        tpot_s = (now_s - run.first_token_s) / later if later > 0 else 0.0
        if later > 0:
            figures.tpot_s.add(tpot_s)
        figures.e2e_s.add(now_s - request.complete_s)
        figures.generated_tokens += request.output_tokens
        within_ttft = not figures.slo_ttft_s or ttft_s <= figures.slo_ttft_s
        within_tpot = not figures.slo_tpot_s or tpot_s <= figures.slo_tpot_s
        figures.attained += within_ttft and within_tpot
        for place, (most_ttft_s, most_tpot_s) in enumerate(figures.objectives):
            figures.attained_of[place] += ttft_s <= most_ttft_s and tpot_s <= most_tpot_s

    def _is_measured(self, run: RequestRun) -> bool:
        return run.request.arrival_s >= self._warm_up_s
