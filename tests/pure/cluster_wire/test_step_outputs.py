"""Whatever is put into columns comes out of them, call by call and in order."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_wire.step_outputs import MOST_EVENT_BYTES, MOST_ROWS, StepRows, Unread, rows_of
from tests.examples import examples

_Given = tuple[int, tuple[int, ...], str, wire.DecodeResponse | None]
END = wire.DecodeResponse(end=wire.DecodeEnd(completion_tokens=3, delta=generation.CompletionDelta(text="!")))
_PIECES = st.tuples(st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple), st.text(max_size=3), st.none())
_EVENTS = st.just(((), "", END))
_ROWS = st.lists(st.tuples(st.integers(1, 4), _PIECES | _EVENTS).map(lambda row: (row[0], *row[1])), max_size=40)


def put(rows: StepRows, row: _Given) -> None:
    call, token_ids, text, response = row
    if response is None:
        rows.put_tokens(call, token_ids, text)
    else:
        rows.put(call, response)


def sent(message: wire.StreamOutputsResponse) -> wire.StreamOutputsResponse:
    return wire.StreamOutputsResponse.FromString(message.SerializeToString())


@examples(200)
@given(_ROWS)
def test_rows_come_back_in_order_and_each_call_has_its_own(
    given_rows: list[tuple[int, tuple[int, ...], str, None]],
) -> None:
    rows = StepRows()
    for row in given_rows:
        put(rows, row)

    message = sent(rows.take())

    assert [(call, tuple(ids), text, response) for call, ids, text, response in rows_of(message)] == given_rows
    assert not rows

    unread: dict[int, Unread] = defaultdict(Unread)
    for each in rows_of(message):
        unread[each[0]].put(each)
    for call, inbox in unread.items():
        _check_taken(inbox, [row for row in given_rows if row[0] == call])


def _check_taken(inbox: Unread, put_in: list[_Given]) -> None:
    taken = []
    while (response := inbox.take()) is not None:
        taken.append(response)
    told = [token for response in taken for token in response.delta.token_ids]
    assert told == [token for row in put_in for token in row[1]]
    assert "".join(response.delta.text for response in taken) == "".join(row[2] for row in put_in)
    kinds = [response.WhichOneof("event") for response in taken]
    assert kinds.count("end") == sum(row[3] is not None for row in put_in)
    assert ("delta", "delta") not in itertools.pairwise(kinds), "pieces that wait together are one"


def test_a_message_has_so_many_rows_at_most() -> None:
    rows = StepRows()
    for call in range(MOST_ROWS + 1):
        rows.put_tokens(call, (1,), "a")

    assert len(rows.take().calls) == MOST_ROWS
    assert list(rows.take().calls) == [MOST_ROWS]


def test_a_message_has_so_many_bytes_at_most_and_a_row_that_has_more_is_one_of_its_own() -> None:
    rows = StepRows()
    large = wire.DecodeResponse(delta=generation.CompletionDelta(text="x" * (MOST_EVENT_BYTES // 2)))
    huge = wire.DecodeResponse(delta=generation.CompletionDelta(text="x" * (2 * MOST_EVENT_BYTES)))
    for response in (END, large, huge, huge, large):
        rows.put(1, response)

    assert [len(rows.take().calls) for _ in range(4)] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    "message",
    [
        wire.StreamOutputsResponse(calls=[1], token_counts=[1], token_ids=[5]),
        wire.StreamOutputsResponse(calls=[1], token_counts=[1], token_ids=[5, 6], texts=["a"]),
    ],
    ids=["no text", "a token too many"],
)
def test_columns_that_do_not_fit_are_refused(message: wire.StreamOutputsResponse) -> None:
    with pytest.raises(ValueError):
        list(rows_of(message))
