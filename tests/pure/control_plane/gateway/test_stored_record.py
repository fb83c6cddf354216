"""A stored response as bytes, and which ids may be one's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.gateway.stored_record import Record, is_response_id, read, written

JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner, max_size=3), max_leaves=9
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)


@given(st.lists(OBJECTS, max_size=3), OBJECTS)
def test_what_is_written_is_read(items: list[dict[str, object]], response: dict[str, object]) -> None:
    record = Record("resp_1", tuple(items), response)
    assert read("resp_1", written(record)) == record


def test_half_of_a_pair_comes_back() -> None:
    record = Record("resp_1", ({"content": "\ud800"},), {})
    assert read("resp_1", written(record)) == record


@pytest.mark.parametrize("value", [b"", b"nonsense", b"[]", b"{}", b'{"version": 2, "items": [], "response": {}}'])
def test_another_version_is_none(value: bytes) -> None:
    assert read("resp_1", value) is None


@pytest.mark.parametrize(
    ("given_id", "is_one"),
    [
        ("resp_a1-B", True),
        ("resp_", False),
        ("x", False),
        ("resp_a b", False),
        ("resp_" + "a" * 129, False),
        ("", False),
    ],
)
def test_ids(given_id: str, is_one: bool) -> None:
    assert is_response_id(given_id) is is_one
