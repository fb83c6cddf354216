"""A session wakes the task that tells of its progress, and lets its client go on while there is room."""

import pytest
from rachis.v1 import generation_pb2 as generation

from control_plane.sessions.backlog import Backlog
from control_plane.sessions.changes import SessionChanges
from control_plane.sessions.session import Session


class World:
    """A session whose client may be ten tokens ahead."""

    def __init__(self) -> None:
        self.session = Session(generation.SESSION_MODE_APPEND, [1], [], max_prompt_tokens=100)
        self.backlog = Backlog(max_unapplied_inputs=100, max_backlog_tokens=10)
        self.idle = 0
        self.changes = SessionChanges(self.session, self.backlog, self._count_idle)

    def _count_idle(self) -> None:
        self.idle += 1

    def append(self, tokens: int) -> None:
        self.session.take_in(self.session.appended([7] * tokens))
        self.backlog.sent(len(self.session.tokens), tokens)
        self.changes.note()


@pytest.fixture
def world() -> World:
    world = World()
    world.backlog.attach(1)
    return world


def test_before_anything_has_happened_there_is_room_and_no_news() -> None:
    changes = World().changes
    assert (changes.room.is_set(), changes.news.is_set()) == (True, False)


def test_a_client_that_is_too_far_ahead_waits_for_the_engine(world: World) -> None:
    world.append(11)
    assert (world.changes.room.is_set(), world.changes.news.is_set()) == (False, True)

    world.backlog.progressed(generation.SessionProgress(ready_tokens=12))
    world.changes.note()
    assert world.changes.room.is_set()


def test_after_its_finish_nothing_of_a_session_is_held_back(world: World) -> None:
    world.append(11)
    world.session.take_in(world.session.finished_with([]))
    world.changes.note()
    assert world.changes.room.is_set()


def test_a_session_whose_prompt_is_computed_is_idle_until_more_comes(world: World) -> None:
    world.append(3)
    assert world.idle == 0
    world.backlog.progressed(generation.SessionProgress(inputs=1, prompt_tokens=4, ready_tokens=3))
    world.changes.note()
    assert world.idle == 1


def test_a_session_whose_prompt_may_be_replaced_is_idle_once_its_worker_has_taken_in_what_came() -> None:
    """Its engine may compute it late, or never before its end."""
    backlog = Backlog(max_unapplied_inputs=100, max_backlog_tokens=10, replaces=True)
    for _ in range(2):
        seen = [backlog.is_idle]
        backlog.attach(3)
        seen.append(backlog.is_idle)
        backlog.sent(5, 4)
        for inputs, tokens in ((0, 3), (1, 5)):
            backlog.progressed(generation.SessionProgress(inputs=inputs, prompt_tokens=tokens))
            seen.append(backlog.is_idle)
        backlog.detach()
        # No worker has it, or it may not take it; then it has some of it, and all.
        assert seen == [False, False, False, True]


def test_a_session_that_nobody_computes_before_it_is_whole_is_idle_whatever_comes(world: World) -> None:
    world.backlog.detach()
    world.changes.note()
    assert world.idle == 0, "another worker may be found"
    world.backlog.put_off()
    world.changes.note()
    world.session.take_in(world.session.appended([7]))
    world.changes.note()
    assert world.idle == 2
    world.session.take_in(world.session.finished_with([]))
    world.changes.note()
    assert world.idle == 2


def test_a_session_that_is_finished_is_not_idle(world: World) -> None:
    world.session.take_in(world.session.finished_with([]))
    world.backlog.progressed(generation.SessionProgress(prompt_tokens=1, ready_tokens=1))
    world.changes.note()
    assert world.idle == 0
