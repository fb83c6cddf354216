"""When a session that is placed waits for a slot before."""

from typing import Any, cast

import pytest
from rachis.v1 import generation_pb2 as generation

from control_plane.sessions.backlog import Backlog
from control_plane.sessions.prefill import PromptInPieces
from control_plane.sessions.session import Session

NONE = cast(Any, None)


class HeldError(Exception):
    pass


async def hold() -> None:
    raise HeldError


def test_only_a_session_that_a_worker_has_accepted_waits_for_a_slot_before_it_is_placed_again() -> None:
    """Its client has not heard of another one, and nothing that it says is read: it was admitted when it was opened."""
    session = Session(generation.SESSION_MODE_APPEND, [], [], max_prompt_tokens=100)
    pieces = PromptInPieces(NONE, NONE, session, Backlog(100, 10), lambda: None, lambda: 0.0, hold)
    with pytest.raises(StopIteration):
        pieces.may_go_on().send(None)
    pieces.placed.set()
    with pytest.raises(HeldError):
        pieces.may_go_on().send(None)
