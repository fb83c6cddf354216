"""What the calls of one router have produced, in columns: `StreamOutputsResponse`, from workers to routers. Pure.

A token that travels in a message of its own costs both ends more than its computation: gRPC's price is for the message.
Rows of a step are one message; what came while the stream was busy is in the next one.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

# Of one message: log-probabilities can make a single row large, and a router may have been away for a while.
MOST_ROWS = 4096
MOST_EVENT_BYTES = 1 << 20

# The call, token ids, their text, and the response where the row is more than that.
Row = tuple[int, Sequence[int], str, wire.DecodeResponse | None]


class StepRows:
    """Rows that wait to be sent, in order. They are bounded by what the calls may generate."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def put_tokens(self, call: int, token_ids: Sequence[int], text: str) -> None:
        self._rows.append((call, token_ids, text, None))

    def put(self, call: int, response: wire.DecodeResponse) -> None:
        self._rows.append((call, (), "", response))

    def take(self) -> wire.StreamOutputsResponse:
        """One message, of the first rows."""
        calls: list[int] = []
        counts: list[int] = []
        token_ids: list[int] = []
        texts: list[str] = []
        events: list[wire.StepEvent] = []
        event_bytes = 0
        while self._rows and len(calls) < MOST_ROWS:
            call, row_ids, text, response = self._rows[0]
            if response is not None:
                event_bytes += response.ByteSize()
                if events and event_bytes > MOST_EVENT_BYTES:
                    break
                events.append(wire.StepEvent(row=len(calls), response=response))
            self._rows.popleft()
            calls.append(call)
            counts.append(len(row_ids))
            token_ids += row_ids
            texts.append(text)
        return wire.StreamOutputsResponse(
            calls=calls, token_counts=counts, token_ids=token_ids, texts=texts, events=events
        )


def rows_of(message: wire.StreamOutputsResponse) -> Iterator[Row]:
    """The rows in order. Raises ValueError for columns that do not fit each other."""
    events = {event.row: event.response for event in message.events}
    token_ids = list(message.token_ids)
    at = 0
    for row, (call, count, text) in enumerate(zip(message.calls, message.token_counts, message.texts, strict=True)):
        yield call, token_ids[at : at + count], text, events.get(row)
        at += count
    if at != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens for rows of {at}")


class Unread:
    """Of one call, what has come and was not taken. Pieces that only add tokens and text are taken as one."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque()

    def put(self, row: Row) -> None:
        self._rows.append(row)

    def take(self) -> wire.DecodeResponse | None:
        """The next response; None where nothing waits."""
        if not self._rows:
            return None
        _, token_ids, text, response = self._rows.popleft()
        if response is not None:
            return response
        if self._rows and self._rows[0][3] is None:
            token_ids, text = self._merged(token_ids, text)
        return wire.DecodeResponse(delta=generation.CompletionDelta(token_ids=token_ids, text=text))

    def _merged(self, token_ids: Sequence[int], text: str) -> tuple[Sequence[int], str]:
        merged, texts = list(token_ids), [text]
        while self._rows and self._rows[0][3] is None:
            _, more, piece, _ = self._rows.popleft()
            merged += more
            texts.append(piece)
        return merged, "".join(texts)
