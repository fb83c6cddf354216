"""Which loads from host memory are asynchronous: no step waits for them, their requests do. Pure.

A synchronous load costs every other request, of the step that waits for it and behind it, what the copy takes. An
asynchronous one costs its own request alone: the rest of the step that computes when it lands. Whatever costs less in
sum is done (docs/decisions/0079).
"""

from collections import deque


class AsyncLoads:
    """Told of steps by whoever takes them; several may be under way, and end in order."""

    def __init__(self) -> None:
        # What the last step took that computed anything; 0 before the first.
        self.step_s = 0.0
        # (step, when it began, whether it waits for a load).
        self._under_way: deque[tuple[object, float, bool]] = deque()
        self._ended_s = 0.0

    def began(self, step: object, now_s: float, *, waits: bool = False) -> None:
        """step: what `ended` will be told of. waits: for a load, which says nothing of how long steps take that a load
        might run beside."""
        self._under_way.append((step, now_s, waits))

    def ended(self, step: object, now_s: float, alike: int = 1) -> None:
        """Steps that it was not told of are ignored. alike: as how many, one after the other, it has been taken."""
        if not any(each is step for each, *_ in self._under_way):
            return
        while self._under_way:
            each, began_s, waits = self._under_way.popleft()
            if each is step:
                if not waits:
                    # One that began while another one was under way has waited for it.
                    self.step_s = (now_s - max(began_s, self._ended_s)) / alike
                self._ended_s = now_s
                return

    def is_cheaper(self, load_s: float, others: int) -> bool:
        """Whether a load that takes so long is cheaper asynchronous.

        others: requests that would be held up by it: of the step, and behind it.
        """
        return others > 0 and load_s * others > self.step_s
