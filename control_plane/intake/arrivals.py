"""What every request gets when it arrives: a lifecycle, the time of its arrival, and its deadline."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster_core.clock import monotonic_s
from cluster_core.ids import RequestId
from control_plane.model.job import Job
from control_plane.model.lifecycle import RequestLifecycle


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Of one router. Those who watch requests from outside, as the fault simulator does, bring their own makers."""

    # The longest that a request may take.
    request_timeout_s: float
    # How long a client may take nothing of its answer.
    send_timeout_s: float
    now_s: Callable[[], float] = monotonic_s
    make_lifecycle: Callable[[RequestId], RequestLifecycle] = RequestLifecycle
    make_job: Callable[..., Job] = Job

    def timeout_s(self, remaining_s: float | None) -> float:
        """remaining_s: what the client gave the call; None or 0 where it gave nothing."""
        return min(self.request_timeout_s, remaining_s or self.request_timeout_s)
