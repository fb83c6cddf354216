"""The input side of one session: what its client may say when, and the prompt that comes of it. Pure.

    tokens of the prompt   from                                  set by
    head                   prefix, up to where pieces go         `open`
    context                pieces                                `append`, `update`
    closing                text or tokens of `finish`            `finish`
    tail                   end of the open chat message, turns   `open`; `finish` where it brings chat messages
                           after it, generation header

What a client sends is refused with an error of `cluster_core.errors`, or becomes a `Change`, which `take_in` makes: it
may have to wait for a slot in between, and nobody is to see it before. A worker that prefills is told its command,
which is None where nothing changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from rachis.v1 import generation_pb2 as generation

from cluster_core.errors import InvalidInputError, OutOfOrderError, OutOfRangeError, StaleRevisionError
from cluster_core.token_prefix import longest_common_prefix


class InputState(Enum):
    OPEN = "open"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class Input(Enum):
    APPEND = "append"
    UPDATE = "update"
    FINISH = "finish"
    CANCEL = "cancel"


# An input that a state does not name is refused there.
TRANSITIONS: dict[InputState, dict[Input, InputState]] = {
    InputState.OPEN: {
        Input.APPEND: InputState.OPEN,
        Input.UPDATE: InputState.OPEN,
        Input.FINISH: InputState.FINISHED,
        Input.CANCEL: InputState.CANCELLED,
    },
    InputState.FINISHED: {Input.CANCEL: InputState.CANCELLED},
    InputState.CANCELLED: {},
}


@dataclass(frozen=True, slots=True)
class Append:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Update:
    """The first `keep_tokens` of the prompt stay, what follows them is replaced."""

    keep_tokens: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Finish:
    token_ids: Sequence[int]


Command = Append | Update | Finish


@dataclass(frozen=True, slots=True)
class Change:
    """One input that was checked and is not taken in yet. came_tokens: those that an update keeps, too."""

    kind: Input
    command: Command | None
    came_tokens: int
    revision: int | None = None

    @property
    def new_tokens(self) -> int:
        """That the session does not have."""
        return len(self.command.token_ids) if self.command is not None else 0


@dataclass(slots=True)
class Session:
    """`tokens` is the prompt as it stands: head and context, and all of it once the session is finished.

    max_prompt_tokens: what max_tokens leaves of the model's length. inputs and received_tokens count what was taken in,
    what an update has replaced included.
    """

    mode: generation.SessionMode.ValueType
    head: Sequence[int]
    tail: Sequence[int]
    max_prompt_tokens: int
    state: InputState = InputState.OPEN
    tokens: list[int] = field(default_factory=list)
    revision: int | None = None
    inputs: int = 0
    received_tokens: int = 0

    def __post_init__(self) -> None:
        self._check_length(len(self.head), self.tail, "open.prefix")
        self.tokens = list(self.head)
        self.received_tokens = len(self.head)

    @property
    def finished(self) -> bool:
        return self.state is InputState.FINISHED

    def check(self, kind: Input) -> InputState:
        """The state that this input leads to. Raises OutOfOrderError where it is not taken."""
        following = TRANSITIONS[self.state].get(kind)
        if following is None:
            raise OutOfOrderError(f"the session is {self.state.value} and takes no more input", field=kind.value)
        if kind is Input.UPDATE and self.mode != generation.SESSION_MODE_UPDATE:
            raise OutOfOrderError("the session was opened in mode APPEND, which takes no update", field=kind.value)
        return following

    def appended(self, token_ids: Sequence[int]) -> Change:
        """To the end of the context. Raises OutOfOrderError, OutOfRangeError."""
        self.check(Input.APPEND)
        self._check_length(len(self.tokens) + len(token_ids), self.tail, "append.piece")
        return Change(Input.APPEND, Append(token_ids) if token_ids else None, len(token_ids))

    def check_revision(self, revision: int) -> None:
        """Raises StaleRevisionError for one that is not above the last."""
        if self.revision is not None and revision <= self.revision:
            raise StaleRevisionError(
                f"must be above {self.revision}, the last one that was taken, got {revision}", field="update.revision"
            )

    def updated(self, revision: int, token_ids: Sequence[int]) -> Change:
        """In place of the context. Raises OutOfOrderError, StaleRevisionError, OutOfRangeError."""
        self.check(Input.UPDATE)
        self.check_revision(revision)
        self._check_length(len(self.head) + len(token_ids), self.tail, "update.context")
        prompt = [*self.head, *token_ids]
        keep = longest_common_prefix(self.tokens, prompt)
        changed = keep < len(prompt) or keep < len(self.tokens)
        return Change(Input.UPDATE, Update(keep, prompt[keep:]) if changed else None, len(token_ids), revision)

    def finished_with(self, closing: Sequence[int], tail: Sequence[int] | None = None) -> Change:
        """The prompt is complete with it; `tail` where it differs from that of `open`.

        Raises OutOfOrderError, OutOfRangeError, and InvalidInputError for an empty prompt.
        """
        self.check(Input.FINISH)
        last = [*closing, *(self.tail if tail is None else tail)]
        self._check_length(len(self.tokens), last, "finish.closing")
        if not self.tokens and not last:
            raise InvalidInputError("the prompt has no tokens", field="finish")
        return Change(Input.FINISH, Finish(last), len(last))

    def take_in(self, change: Change) -> Command | None:
        """What the worker has to be told of it. Nothing else was taken in since the change was checked."""
        self.state = self.check(change.kind)
        match change.command:
            case Append(token_ids) | Finish(token_ids):
                self.tokens += token_ids
            case Update(keep_tokens, token_ids):
                self.tokens[keep_tokens:] = token_ids
        if change.revision is not None:
            self.revision = change.revision
        self.inputs += change.kind is not Input.FINISH
        self.received_tokens += change.came_tokens
        return change.command

    def cancel(self) -> None:
        """Raises OutOfOrderError when it was cancelled already."""
        self.state = self.check(Input.CANCEL)

    def check_invariants(self) -> None:
        assert self.tokens[: len(self.head)] == list(self.head), "the head never changes"
        reserved = 0 if self.state is not InputState.OPEN else len(self.tail)
        assert len(self.tokens) + reserved <= self.max_prompt_tokens
        assert self.received_tokens >= len(self.tokens)

    def _check_length(self, prompt_tokens: int, last: Sequence[int], name: str) -> None:
        total = prompt_tokens + len(last)
        if total > self.max_prompt_tokens:
            raise OutOfRangeError(
                f"makes a prompt of {total} tokens, what closes it included; the model's length less max_tokens leaves "
                f"{self.max_prompt_tokens}",
                field=name,
            )
