"""How many sessions may be open, in all and of one client; and the slot that one has while it has work."""

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack

import pytest

from cluster_core.errors import OverloadedError
from cluster_core.tenant_shares import Claimant
from control_plane.intake.admission import Admission
from control_plane.sessions.places import OpenSessions, SessionSlot, client_of
from tests import simulated_time


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:10.0.0.7:51234", "ipv4:10.0.0.7"),
        ("ipv6:%5B::1%5D:51234", "ipv6:%5B::1%5D"),
        ("unix:/run/rachis.sock", "unix:/run/rachis.sock"),
        ("unix:", "unix:"),
    ],
)
def test_connections_of_one_host_are_one_client(peer: str, client: str) -> None:
    assert client_of(peer) == client


def test_a_place_is_given_back_whatever_ends_the_session() -> None:
    sessions = OpenSessions(2, 1)
    with pytest.raises(ZeroDivisionError), sessions.one_more("ipv4:10.0.0.7:1"):
        assert len(sessions) == 1
        raise ZeroDivisionError
    assert len(sessions) == 0
    with sessions.one_more("ipv4:10.0.0.7:2"):
        pass


def test_one_client_does_not_take_the_places_of_others() -> None:
    sessions = OpenSessions(3, 2)
    with ExitStack() as held:
        for port in (1, 2):
            held.enter_context(sessions.one_more(f"ipv4:10.0.0.7:{port}"))
        with pytest.raises(OverloadedError, match="max_client_sessions"), sessions.one_more("ipv4:10.0.0.7:3"):
            pass
        held.enter_context(sessions.one_more("ipv4:10.0.0.8:1"))
        with pytest.raises(OverloadedError, match="max_open_sessions"), sessions.one_more("ipv4:10.0.0.9:1"):
            pass
    assert len(sessions) == 0


# The slot.


async def waits(moving: Awaitable[None]) -> "asyncio.Task[None]":
    """It has begun, and looked several times."""
    task = asyncio.ensure_future(moving)
    await asyncio.sleep(3.0)
    assert not task.done()
    return task


def test_a_session_that_moves_takes_a_slot_that_is_free_and_waits_behind_all_who_wait_for_one() -> None:
    async def moves() -> None:
        admission = Admission(1, 1, 30.0)
        other = await admission.take()
        slot = SessionSlot(admission, Claimant(0, "a"))
        moving = await waits(slot.hold_again())
        assert (admission.in_flight, admission.queued) == (1, 0), "it keeps nobody out of the queue"
        next_one = asyncio.create_task(admission.take())
        await asyncio.sleep(0)
        other.release()
        await waits(asyncio.shield(moving))
        (await next_one).release()
        await moving
        assert admission.in_flight == 1
        await slot.hold_again()
        assert admission.in_flight == 1, "it has one already"
        slot.give_back()
        assert admission.in_flight == 0
        admission.check_invariants()

    simulated_time.run(moves())


def test_a_session_that_moves_goes_on_with_the_slot_that_its_next_input_has_waited_for_and_takes_no_other_one() -> None:
    async def moves() -> None:
        admission = Admission(2, 4, 30.0)
        others = [await admission.take() for _ in range(2)]
        slot = SessionSlot(admission, Claimant(0, "a"))
        moving = await waits(slot.hold_again())
        sending = asyncio.create_task(slot.hold(5))
        await asyncio.sleep(0)
        assert admission.queued == 1
        for other in others:
            other.release()
        await asyncio.gather(moving, sending)
        assert (admission.in_flight, admission.queued) == (1, 0)
        slot.give_back()
        assert admission.in_flight == 0
        admission.check_invariants()

    simulated_time.run(moves())


def test_a_session_that_ends_while_it_moves_leaves_nothing() -> None:
    async def moves() -> None:
        admission = Admission(1, 1, 30.0)
        other = await admission.take()
        moving = await waits(SessionSlot(admission, Claimant(0, "a")).hold_again())
        moving.cancel()
        await asyncio.wait({moving})
        other.release()
        assert (admission.in_flight, admission.queued) == (0, 0)
        admission.check_invariants()

    simulated_time.run(moves())


async def test_a_session_that_has_given_its_slot_back_is_not_refused_by_a_full_queue() -> None:
    """All that its client has sent would be lost with it."""
    admission = Admission(1, 0, 30.0)
    slot, late = SessionSlot(admission, Claimant()), SessionSlot(admission, Claimant())
    await slot.hold(10)
    slot.give_back()
    other = await admission.take()
    with pytest.raises(OverloadedError, match="more are not taken"):
        await late.hold(10)
    finishing = asyncio.create_task(slot.hold(10))
    await asyncio.sleep(0)
    assert admission.queued == 1
    other.release()
    await finishing
    assert admission.in_flight == 1
    slot.give_back()
