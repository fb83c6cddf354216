"""What was decided for requests of late, by request id, for people who ask why."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from control_plane.placement.decision import Choice, RouteChoice
from control_plane.placement.disaggregation import Prices, Reason

_MOST_REQUESTS = 1000
_MOST_CHOICES = 8


@dataclass(slots=True)
class Explanation:
    """What was decided for one request, in order; of many attempts the last ones."""

    request_id: str
    choices: deque[Choice] = field(default_factory=lambda: deque(maxlen=_MOST_CHOICES))
    reason: Reason | None = None
    prices: Prices | None = None


class DecisionLog:
    """The last requests that something was decided for."""

    def __init__(self) -> None:
        self._explanations: OrderedDict[str, Explanation] = OrderedDict()

    def routed(self, request_id: str, route: RouteChoice) -> None:
        """A client may give one name to many requests: the last one is explained."""
        self._explanations.pop(request_id, None)
        explanation = self._of(request_id)
        explanation.reason, explanation.prices = route.reason, route.prices

    def placed(self, request_id: str, choice: Choice) -> None:
        self._of(request_id).choices.append(choice)

    def explanation(self, request_id: str) -> Explanation | None:
        return self._explanations.get(request_id)

    @property
    def request_ids(self) -> list[str]:
        """The last one last."""
        return list(self._explanations)

    def _of(self, request_id: str) -> Explanation:
        known = self._explanations.get(request_id)
        if known is None:
            known = self._explanations[request_id] = Explanation(request_id)
            while len(self._explanations) > _MOST_REQUESTS:
                self._explanations.popitem(last=False)
        return known
