"""vLLM's queue of waiting requests with a gate: while it is closed, a step sees only the requests that were planned."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request


class GatedQueue(RequestQueue):
    """With the gate open it is vLLM's first-come-first-served queue. Length and iteration are always those of all."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict((each.request_id, each) for each in requests)
        # What a step may see, last first; None: the gate is open.
        self._shown: list[str] | None = None
        self._seen: frozenset[str] = frozenset()

    def close(self, shown: Sequence[str]) -> None:
        """Shows these alone, in this order, until `open`."""
        self._shown = list(reversed(shown))
        self._seen = frozenset(shown)

    def open(self) -> None:
        self._shown = None

    def hides(self, request: Request) -> bool:
        """Whether it waits here, and a step may not see it."""
        name = request.request_id
        return self._shown is not None and name in self._requests and name not in self._seen

    def add_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def pop_request(self) -> Request:
        request = self.peek_request()
        del self._requests[request.request_id]
        if self._shown is not None:
            self._shown.pop()
        return request

    def peek_request(self) -> Request:
        if not self:
            raise IndexError("peek from an empty queue")
        name = next(iter(self._requests)) if self._shown is None else self._shown[-1]
        return self._requests[name]

    def prepend_request(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for each in requests:
            self.prepend_request(each)

    def remove_request(self, request: Request) -> None:
        if request.request_id not in self._requests:
            raise ValueError(f"request {request.request_id} does not wait")
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for each in requests:
            self._requests.pop(each.request_id, None)

    def __bool__(self) -> bool:
        if self._shown is None:
            return bool(self._requests)
        while self._shown and self._shown[-1] not in self._requests:
            self._shown.pop()
        return bool(self._shown)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())
