"""What every request gets when it arrives: a lifecycle, the time of its arrival, and its deadline."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from cluster_core.ids import RequestId
from cluster_wire.calls import Context
from control_plane.access.access import Access
from control_plane.intake.grammars import Grammars
from control_plane.intake.shared_rates import SharedRates
from control_plane.model.job import Job
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.tracing.traceparent import parent_of
from control_plane.tracing.traces import Traces

# The clock of a client runs a little ahead of the router's, which starts when the call has come: a call that its client
# ends in the last part of its time has expired there. The part, and seconds at most.
_ENDED_BY_DEADLINE = 0.1
_ENDED_BY_DEADLINE_MOST_S = 0.5


def expired(given_s: float | None, remaining_s: float | None) -> bool:
    """Whether a call that ended early ended at its deadline: what its client gave it, and what is left of that."""
    if given_s is None or remaining_s is None:
        return False
    return remaining_s <= min(_ENDED_BY_DEADLINE * given_s, _ENDED_BY_DEADLINE_MOST_S)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Of one router. Those who watch requests from outside, as the fault simulator does, bring their own makers."""

    # The longest that a request may take.
    request_timeout_s: float
    # How long a client may take nothing of its answer.
    send_timeout_s: float
    grammars: Grammars
    rates: SharedRates
    now_s: Callable[[], float] = monotonic_s
    make_lifecycle: Callable[[RequestId], RequestLifecycle] = RequestLifecycle
    make_job: Callable[..., Job] = Job
    # By name, those that may be asked for now.
    adapters: Mapping[str, wire.Adapter] = field(default_factory=dict)
    # Who calls, and what keeps their prefixes apart.
    access: Access = field(default_factory=Access)
    traces: Traces = field(default_factory=Traces)

    def begun(self, request_id: RequestId, kind: str, context: Context) -> RequestLifecycle:
        """One has arrived now. kind: as in `GetTraceResponse`."""
        lifecycle = self.make_lifecycle(request_id)
        self.traces.begin(lifecycle, kind, parent_of(context.invocation_metadata() or ()))
        return lifecycle

    def timeout_s(self, remaining_s: float | None) -> float:
        """remaining_s: what the client gave the call; None or 0 where it gave nothing."""
        return min(self.request_timeout_s, remaining_s or self.request_timeout_s)
