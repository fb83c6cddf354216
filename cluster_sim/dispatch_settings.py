"""What the router of a simulated cluster is set to."""

from dataclasses import dataclass

from control_plane.dispatch.journey import JourneyLimits


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """The router of the simulated cluster."""

    # Of one message between router and worker.
    hop_s: float = 0.0005
    prefill_attempts: int = 2
    # How long a request waits for a decode worker.
    worker_wait_s: float = 30.0
    # How long a request may take in all.
    timeout_s: float = 600.0
    # From the end of its prefill on, until when its KV has to be pulled; later it is computed again.
    handoff_deadline_s: float = 15.0
    # Requests that arrive before are served, and not measured.
    warm_up_s: float = 0.0

    @property
    def limits(self) -> JourneyLimits:
        return JourneyLimits(self.prefill_attempts, self.worker_wait_s, self.handoff_deadline_s)
