"""`rachis logs --follow` shows each event once, whatever the clocks of hosts say, and counts what it does not show."""

from collections.abc import Sequence

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.log_files import MOST_EVENTS
from command_line.log_follow import LATE_MS, LONGEST_PAUSE_S, Following

NOW_MS = 1_000_000
# The clock of this host is an hour behind.
SLOW_MS = NOW_MS - 3_600_000 + 10_000_000
FAST_MS = SLOW_MS + 3_600_000


def event(at_ms: int, message: str = "a", node: str = "") -> wire.LogEvent:
    return wire.LogEvent(unix_ms=at_ms, message=message, process="router", node=node)


def answer(
    *events: wire.LogEvent, missing: Sequence[str] = (), left_out: int = 0, **read_ms: int
) -> admin.GetLogsResponse:
    """read_ms: by host, `router` for the router's own; the router alone at NOW_MS where none is given."""
    sources = [
        admin.LogSource(node="" if node == "router" else node, read_unix_ms=at_ms, left_out=left_out)
        for node, at_ms in (read_ms or {"router": NOW_MS}).items()
    ]
    return admin.GetLogsResponse(events=events, missing=missing, sources=sources)


def following(*shown: wire.LogEvent, **read_ms: int) -> Following:
    return Following(wire.LogQuery(), answer(*shown, missing=(), left_out=0, **read_ms))


def test_an_event_that_is_told_again_is_shown_once() -> None:
    follow = following(event(NOW_MS - 2))
    assert follow.news(answer(event(NOW_MS - 2), event(NOW_MS - 1))).events == [event(NOW_MS - 1)]
    assert follow.news(answer(event(NOW_MS - 2), event(NOW_MS - 1))).events == []


def test_two_events_of_one_millisecond_that_are_the_same_to_the_letter_are_two() -> None:
    follow = following(event(NOW_MS))
    assert follow.news(answer(event(NOW_MS), event(NOW_MS))).events == [event(NOW_MS)]
    assert follow.news(answer(event(NOW_MS), event(NOW_MS))).events == []


def test_each_host_is_asked_from_where_its_own_clock_stood() -> None:
    follow = following(router=FAST_MS, slow=SLOW_MS)
    assert dict(follow.request().since_unix_ms) == {"": FAST_MS - LATE_MS, "slow": SLOW_MS - LATE_MS}
    late = event(SLOW_MS + 500, "by the slow clock", "slow")
    assert follow.news(answer(late, router=FAST_MS + 1000, slow=SLOW_MS + 1000)).events == [late]
    assert follow.news(answer(late, router=FAST_MS + 2000, slow=SLOW_MS + 2000)).events == []
    assert dict(follow.request().since_unix_ms) == {
        "": FAST_MS + 2000 - LATE_MS,
        "slow": SLOW_MS + 2000 - LATE_MS,
    }


def test_an_event_that_is_dated_in_the_future_hides_none_that_come_after_it() -> None:
    ahead = event(NOW_MS * 10, "ahead")
    follow = following(ahead)
    assert follow.news(answer(ahead, event(NOW_MS + 1), router=NOW_MS + 1000)).events == [event(NOW_MS + 1)]


def test_a_host_that_does_not_answer_for_a_while_is_asked_from_where_it_was() -> None:
    follow = following(router=NOW_MS, h1=NOW_MS)
    follow.news(answer(router=NOW_MS + 60_000, missing=["the logs of h1 cannot be read: no"]))
    assert follow.request().since_unix_ms["h1"] == NOW_MS - LATE_MS


def test_a_host_that_comes_later_is_asked_for_what_it_has_said_since_the_first_answer() -> None:
    follow = following(router=FAST_MS, slow=SLOW_MS)
    assert follow.request().query.since_unix_ms == SLOW_MS - LATE_MS
    assert follow.request().query.most_events == MOST_EVENTS


def test_that_a_host_is_missing_is_said_once_and_again_after_it_was_there() -> None:
    gone = "the logs of h1 cannot be read: no worker of it serves"
    follow = Following(wire.LogQuery(), answer(missing=[gone]))
    assert follow.news(answer(missing=[gone])).sentences == []
    assert follow.news(answer()).sentences == []
    assert follow.news(answer(missing=[gone])).sentences == [gone]
    assert follow.news(answer(missing=[gone])).sentences == []


def test_events_that_come_faster_than_they_are_told_are_counted() -> None:
    follow = following(event(NOW_MS - 1, "shown"))
    told = [event(NOW_MS + 10 + at, "many") for at in range(MOST_EVENTS)]
    # The one that was shown is among those that are left out.
    news = follow.news(answer(*told, left_out=301, router=NOW_MS + 1000))
    assert news.sentences == ["300 events more came than are told at once (2,000): they are in the files, not here"]
    assert follow.request().since_unix_ms[""] == NOW_MS + 10, "what was counted is not shown later"


def test_what_the_first_answer_left_out_is_asked_for_no_more() -> None:
    follow = Following(wire.LogQuery(most_events=1), answer(event(NOW_MS - 1), left_out=10, router=NOW_MS))
    assert follow.request().since_unix_ms[""] == NOW_MS - 1
    assert follow.news(answer(event(NOW_MS - 1), event(NOW_MS))).sentences == []


def test_what_is_remembered_is_what_may_be_told_again() -> None:
    follow = following()
    for at_ms in range(NOW_MS, NOW_MS + 3_600_000, 1000):
        follow.news(answer(event(at_ms), router=at_ms))
    assert len(follow._seen) <= LATE_MS / 1000 + 1  # what is remembered shows nowhere else


def test_a_router_that_does_not_answer_is_asked_again_ever_more_slowly_and_is_named_once() -> None:
    follow = following()
    (said,) = follow.failed("connection refused")
    assert said.startswith("the router does not answer: connection refused; ")
    pauses_s = []
    for _ in range(8):
        pauses_s.append(follow.pause_s)
        assert follow.failed("connection refused") == ()
    assert pauses_s[:3] == [2, 4, 8] and max(pauses_s) == LONGEST_PAUSE_S
    assert follow.news(answer()).sentences == ["the router answers again"]
    assert (follow.pause_s, follow.news(answer()).sentences) == (1, [])
