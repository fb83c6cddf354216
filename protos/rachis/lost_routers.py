"""What a client does when a router is gone under its request: another one goes on after what has been received.

An answer that has not begun is asked for once more, so that a request that ends whichever router takes it stops at the
second. One that has begun is no such request: it goes on as long as something comes of it, and waits for a router to
come back.
"""

import math

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

# Routers in turn that were gone without anything new.
_TRIES = 2
_TRIES_ONCE_BEGUN = 4
# Of one answer.
_MOST_RESUMES = 16
# A router that is gone so long after the one before was not ended by this request.
_LIVED_S = 60.0
# For a router to be reached, before the answer has begun and after.
_RECONNECT_S = 1.0
_RECONNECT_ONCE_BEGUN_S = 30.0


class Received:
    """One answer so far, as far as another router has to know it."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._characters = 0
        self._finish_reason: generation.FinishReason.ValueType = generation.FINISH_REASON_UNSPECIFIED
        self._adapter = ""

    def __len__(self) -> int:
        """In tokens."""
        return len(self._token_ids)

    def copy(self) -> "Received":
        other = Received()
        other._token_ids, other._characters = list(self._token_ids), self._characters
        other._finish_reason, other._adapter = self._finish_reason, self._adapter
        return other

    def add(self, delta: generation.CompletionDelta) -> None:
        self._token_ids += delta.token_ids
        self._characters += len(delta.text)
        self._finish_reason = delta.finish_reason
        self._adapter = delta.adapter or self._adapter

    def to_wire(self) -> api.ReceivedAnswer:
        return api.ReceivedAnswer(
            token_ids=self._token_ids,
            text_characters=self._characters,
            finish_reason=self._finish_reason,
            adapter=self._adapter,
        )


class LostRouters:
    """Of one answer, of which so many tokens had been received. lost: how many routers were gone under it. resumed:
    under what had begun of it."""

    def __init__(self, had: int = 0) -> None:
        self.lost = self.resumed = 0
        self._in_turn = 0
        self._had = had
        self._last_s = -math.inf

    @property
    def reconnect_s(self) -> float:
        return _RECONNECT_ONCE_BEGUN_S if self._had else _RECONNECT_S

    def served(self, received: int) -> bool:
        """Whether anything of the answer has come, so many tokens in all, since the last one was gone."""
        return received > self._had

    def may_go_on(self, received: int, now_s: float) -> bool:
        """One more is gone, after so many tokens of the answer: whether another one is asked."""
        self.lost += 1
        has_served = self.served(received) or now_s - self._last_s > _LIVED_S
        self._in_turn = 1 if has_served else self._in_turn + 1
        self._had, self._last_s = received, now_s
        tries = _TRIES_ONCE_BEGUN if received else _TRIES
        if self._in_turn >= tries or self.resumed >= _MOST_RESUMES:
            return False
        self.resumed += bool(received)
        return True
