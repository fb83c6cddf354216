"""How far a session's input is ahead of the engine that computes it, and when its client has to wait for that. Pure.

The client's next message is read only while `has_room`. A worker counts the inputs it takes in from when the session
was opened there; what workers that were lost had computed stays in the sums that clients are told.
"""

from collections import deque
from dataclasses import dataclass, field

from rachis.v1 import generation_pb2 as generation

from control_plane.sessions.session import Session

_SUMS = ("computed_tokens", "reused_tokens", "invalidated_tokens")


@dataclass(slots=True)
class Backlog:
    """replaces: the prompt may be replaced, so what waits to be computed is no measure of what will be; there the
    tokens of inputs that the engine has not taken in are bounded instead."""

    max_unapplied_inputs: int
    max_backlog_tokens: int
    replaces: bool = False
    attached: bool = False
    # No prefill worker is left: nobody computes anything before the prompt is whole.
    is_put_off: bool = False
    # The worker has said where the session stands.
    _is_heard: bool = False
    # Of inputs that the engine has not taken in, the oldest first.
    _unapplied: deque[int] = field(default_factory=deque)
    _sent_inputs: int = 0
    _sent_tokens: int = 0
    _reached_tokens: int = 0
    _worker: generation.SessionProgress = field(default_factory=generation.SessionProgress)
    _before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0))

    @property
    def has_room(self) -> bool:
        """Without a worker there is nobody to wait for; the model's length is the bound then."""
        if not self.attached:
            return True
        if self.unapplied_inputs >= self.max_unapplied_inputs:
            return False
        waiting = sum(self._unapplied) if self.replaces else self.waiting_tokens
        return waiting <= self.max_backlog_tokens

    @property
    def is_idle(self) -> bool:
        """Nobody has anything to compute before the client says more. Of a prompt that may be replaced the engine
        computes what is worth it when it has nothing else to do: that may be never, and nobody waits for it."""
        is_taken_in = self.replaces and self._is_heard and not self.unapplied_inputs
        return self.is_put_off or self.is_computed or is_taken_in

    @property
    def is_computed(self) -> bool:
        """The engine has taken in and computed all that has come: the session waits for its client.

        The last known token is computed with what follows it.
        """
        worker = self._worker
        return self.attached and not self.unapplied_inputs and worker.ready_tokens + 1 >= worker.prompt_tokens

    @property
    def unapplied_inputs(self) -> int:
        return self._sent_inputs - self._worker.inputs if self.attached else 0

    @property
    def waiting_tokens(self) -> int:
        return self._sent_tokens - self._reached_tokens if self.attached else 0

    def attach(self, prompt_tokens: int) -> None:
        """A worker is given the session, with so many tokens."""
        self.detach()
        self.attached, self.is_put_off = True, False
        self._sent_inputs, self._sent_tokens, self._reached_tokens = 0, prompt_tokens, 0
        self._unapplied.clear()
        self._worker = generation.SessionProgress(prompt_tokens=prompt_tokens)

    def detach(self) -> None:
        """The worker is lost, or has done its part."""
        if self.attached:
            self._before = self._summed()
        self.attached = self._is_heard = False

    def put_off(self) -> None:
        """The decode worker computes the prompt, once it is whole."""
        self.is_put_off = True

    def sent(self, prompt_tokens: int, input_tokens: int) -> None:
        """One more input of so many tokens is on its way to the worker; the prompt has so many with it."""
        self._sent_inputs += 1
        self._unapplied.append(input_tokens)
        self._sent_tokens = prompt_tokens

    def progressed(self, progress: generation.SessionProgress) -> None:
        self._worker, self._is_heard = progress, True
        while len(self._unapplied) > max(self.unapplied_inputs, 0):
            self._unapplied.popleft()
        # A session whose blocks were taken from it has been computed all the same: its client is not stopped for that.
        self._reached_tokens = max(self._reached_tokens, progress.ready_tokens)

    def progress(self, session: Session) -> generation.SessionProgress:
        """Where the session stands, for its client."""
        return generation.SessionProgress(
            received_tokens=session.received_tokens,
            prompt_tokens=self._worker.prompt_tokens if self.attached else len(session.tokens),
            ready_tokens=self._worker.ready_tokens if self.attached else 0,
            inputs=session.inputs - self.unapplied_inputs,
            **self._summed(),
        )

    def completed(self, record: generation.SessionRecord, session: Session) -> None:
        """Puts what lost workers had computed into the record of the last one."""
        for name in _SUMS:
            setattr(record.tokens, name, getattr(record.tokens, name) + self._before[name])
        record.tokens.received_tokens = session.received_tokens
        record.tokens.inputs = session.inputs

    def _summed(self) -> dict[str, int]:
        if not self.attached:
            return self._before
        return {name: self._before[name] + int(getattr(self._worker, name)) for name in _SUMS}
