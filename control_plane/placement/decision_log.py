"""What was decided for requests of late, by request id, for people who ask why."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from control_plane.model.memory_use import MemoryUse
from control_plane.placement.by_objective import Choice as WayChoice
from control_plane.placement.decision import Choice, RouteChoice
from control_plane.placement.disaggregation import Prices

_MOST_REQUESTS = 1000
_MOST_CHOICES = 8
# Of an explanation, and of each worker in one of its choices: what was known of it, and what each term made of that.
_BASE_BYTES = 2048
_ROW_BYTES = 256


@dataclass(slots=True)
class Explanation:
    """What was decided for one request, in order; of many attempts the last ones."""

    request_id: str
    tenant: str = ""
    choices: deque[Choice] = field(default_factory=lambda: deque(maxlen=_MOST_CHOICES))
    # A `Reason`, or by the objectives a `Way` or that it was refused; empty where nothing was decided.
    reason: str = ""
    prices: Prices | None = None
    # By the objectives: all that there were, best first, and who decodes what was prefilled apart.
    ways: Sequence[WayChoice] = ()
    # Who has it now, and who decodes what was prefilled apart.
    worker_id: str = ""
    bound_worker_id: str = ""

    @property
    def bytes(self) -> int:
        rows = len(self.ways) + sum(len(choice.view.candidates.workers) for choice in self.choices)
        return _BASE_BYTES + _ROW_BYTES * rows


class DecisionLog:
    """The last requests that something was decided for."""

    def __init__(self, most_bytes: int) -> None:
        # By tenant and name: one tenant's is not another's.
        self._explanations: OrderedDict[tuple[str, str], Explanation] = OrderedDict()
        self._bytes = 0
        self._most_bytes = most_bytes

    def routed(self, request_id: str, tenant: str, route: RouteChoice) -> None:
        """A client may give one name to many requests: the last one is explained."""
        self._forget((tenant, request_id))
        self._remember(Explanation(request_id, tenant, reason=route.reason, prices=route.prices))

    def placed(self, request_id: str, tenant: str, choice: Choice) -> None:
        known = self._forget((tenant, request_id)) or Explanation(request_id, tenant)
        known.choices.append(choice)
        self._remember(known)

    def weighed(
        self, request_id: str, tenant: str, outcome: str, ways: Sequence[WayChoice], worker_id: str = ""
    ) -> None:
        """By the objectives. worker_id: where it is prefilled apart."""
        self._forget((tenant, request_id))
        self._remember(Explanation(request_id, tenant, reason=outcome, ways=tuple(ways), worker_id=worker_id))

    def taken(self, request_id: str, tenant: str, way: WayChoice) -> None:
        """By the objectives, where it goes at last: after a try that has failed, say."""
        known = self._forget((tenant, request_id)) or Explanation(request_id, tenant)
        known.reason, known.worker_id, known.bound_worker_id = way.way.value, way.worker.worker_id, ""
        self._remember(known)

    def bound(self, request_id: str, tenant: str, worker_id: str) -> None:
        known = self._forget((tenant, request_id)) or Explanation(request_id, tenant)
        known.bound_worker_id = worker_id
        self._remember(known)

    def memory(self) -> MemoryUse:
        return MemoryUse("explanations", self._bytes, self._most_bytes, "placement.explanations_mib")

    def explanation(self, request_id: str, tenant: str | None = None) -> Explanation | None:
        """tenant: whose requests may be told of; None: everybody's, and of several with that name the last."""
        if tenant is not None:
            return self._explanations.get((tenant, request_id))
        return next((each for each in self.latest() if each.request_id == request_id), None)

    def latest(self, tenant: str | None = None) -> Iterator[Explanation]:
        """The last one first. tenant: as in `explanation`."""
        return (each for each in reversed(self._explanations.values()) if tenant in (None, each.tenant))

    def request_ids(self, tenant: str | None = None) -> list[str]:
        """The last one last."""
        return [each.request_id for each in self._explanations.values() if tenant in (None, each.tenant)]

    def _remember(self, explanation: Explanation) -> None:
        """As the last one; others go for it."""
        self._explanations[explanation.tenant, explanation.request_id] = explanation
        self._bytes += explanation.bytes
        while self._explanations and (len(self._explanations) > _MOST_REQUESTS or self._bytes > self._most_bytes):
            self._forget(next(iter(self._explanations)))

    def _forget(self, name: tuple[str, str]) -> Explanation | None:
        known = self._explanations.pop(name, None)
        self._bytes -= known.bytes if known is not None else 0
        return known
