"""A connection's conversation: whatever is told in advance, the answer is that of the whole input asked at once."""

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from control_plane.gateway.client_events import Append, Create, Finish, SocketError, Update, items_of
from control_plane.gateway.conversation import Conversation
from control_plane.gateway.kept_responses import KeptResponses
from control_plane.gateway.stored_record import Record
from control_plane.gateway.stored_responses import StoreAwayError
from control_plane.gateway.warm_prompt import Outcomes, WarmPrompt
from tests.examples import seeds
from tests.fakes.warm_cluster import LONGEST_S, Cluster, Renderer, answer_to, rendered

LIMITED: dict[str, Any] = {"max_output_tokens": 9}


class Store:
    """In place of Redis."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.is_away = False

    async def store(self, record: Record) -> None:
        if not self.is_away:
            self.records[record.response_id] = record

    async def find(self, response_id: str) -> Record | None:
        if self.is_away:
            raise StoreAwayError
        return self.records.get(response_id)


class Play:
    """One connection to a cluster of stand-ins."""

    def __init__(self, store: Store | None = None, max_responses: int = 8, max_bytes: int = 1 << 20) -> None:
        self.cluster = Cluster()
        self.outcomes = Outcomes()
        self.renderer = Renderer(self.cluster)
        self.memory = KeptResponses(max_responses, 1 << 20)
        self.now_s = 0.0
        prompt = WarmPrompt(self.cluster, self.outcomes, lambda: self.now_s)
        self.talk = Conversation(self.renderer, prompt, self.memory, store, None, max_bytes)

    async def ask(self, event: Any) -> list[dict[str, Any]]:
        return [json.loads(frame) async for frame in self.talk.frames(event)]

    async def create(self, given: Any, previous: str | None = None, **fields: Any) -> tuple[str, str]:
        """(text, id)"""
        return self.said((await self.ask(Create(fields, items_of(given), previous, True)))[-1])

    async def prepare(self, given: Any, previous: str | None = None, **fields: Any) -> str:
        return self.said((await self.ask(Create(fields, items_of(given), previous, False)))[-1])[1]

    async def append(self, text: str) -> int:
        ((said),) = await self.ask(Append(text=text))
        return int(said["told_tokens"])

    async def finish(self, text: str = "") -> tuple[str, str]:
        return self.said((await self.ask(Finish(Append(text=text))))[-1])

    @staticmethod
    def said(completed: dict[str, Any]) -> tuple[str, str]:
        return completed["response"]["text"], completed["response"]["id"]


def answer(*turns: str) -> str:
    """To turns of a user and the model's between them."""
    roles = ["user", "assistant"] * len(turns)
    items = [{"type": "message", "role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return bytes(answer_to(rendered(items))).decode()


def of_users(*turns: str) -> str:
    """To turns of a user that follow one another."""
    items = [{"type": "message", "role": "user", "content": turn} for turn in turns]
    return bytes(answer_to(rendered(items))).decode()


@pytest_asyncio.fixture
async def play() -> AsyncIterator[Play]:
    made = Play()
    yield made
    await made.talk.close()
    made.memory.check_invariants()
    assert made.cluster.open == [], "a session stays open"


async def test_what_continues_a_response_is_asked_with_all_that_came_before(play: Play) -> None:
    first, name = await play.create("a")
    second, other = await play.create("b", name)
    assert (first, second) == (answer("a"), answer("a", first, "b"))
    third, _ = await play.create("c", other)
    assert third == answer("a", first, "b", second, "c")
    fork, _ = await play.create("d", name)
    assert fork == answer("a", first, "d"), "an earlier one can be gone on from too"


async def test_what_is_not_kept_is_not_found(play: Play) -> None:
    with pytest.raises(SocketError) as refused:
        await play.create("a", "resp_none")
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_a_prepared_response_is_computed_before_it_is_asked_for(play: Play) -> None:
    name = await play.prepare("a long beginning", **LIMITED)
    (session,) = play.cluster.open
    told = len(session.tokens)
    assert bytes(session.tokens).decode().startswith("<user>a long begin")
    assert await play.append(" and its end") > told
    text, _ = await play.finish(", asked")
    assert text == answer("a long beginning and its end, asked")
    assert (play.cluster.answered_by_sessions, play.cluster.answered_plainly) == (1, 0)
    assert play.outcomes == Outcomes(opened=1, answered=1)
    assert (await play.create("x", name))[0] == of_users("a long beginning and its end", "x"), "as it stood"


async def test_openais_own_verb_goes_on_in_the_session_as_well(play: Play) -> None:
    name = await play.prepare([{"type": "message", "role": "user", "content": "tools"}], **LIMITED)
    text, _ = await play.create("question", name, **LIMITED)
    assert text == of_users("tools", "question")
    assert play.outcomes == Outcomes(opened=1, answered=1)


async def test_without_a_limit_the_session_computes_and_the_request_goes_its_usual_way(play: Play) -> None:
    await play.prepare("a long beginning")
    (session,) = play.cluster.open
    assert (session.wishes["max_tokens"], session.wishes["timeout_s"]) == (1, LONGEST_S)
    text, _ = await play.finish(" and end")
    assert text == answer("a long beginning and end")
    assert (play.cluster.answered_plainly, play.outcomes) == (1, Outcomes(opened=1, cancelled=1))


@pytest.mark.parametrize(("age_s", "answered"), [(119.0, Outcomes(1, 1)), (121.0, Outcomes(1, 0, cancelled=1))])
async def test_a_session_that_is_old_leaves_the_answer_to_the_usual_way(
    play: Play, age_s: float, answered: Outcomes
) -> None:
    """A router counts a request's time from the opening: the answer would be cut off after it has begun."""
    await play.prepare("one two three", **LIMITED)
    (session,) = play.cluster.open
    assert session.wishes["timeout_s"] == LONGEST_S
    play.now_s = age_s
    await play.append(" four")
    assert (await play.finish(" five"))[0] == answer("one two three four five")
    assert play.outcomes == answered
    assert play.cluster.answered_plainly == 1 - answered.answered


async def test_an_update_keeps_the_session_where_it_begins_alike_and_opens_another_where_not(play: Play) -> None:
    await play.prepare("one two", **LIMITED)
    await play.ask(Update(items_of("one two three")))
    assert play.outcomes.opened == 1
    await play.ask(Update(items_of("two one")))
    assert play.outcomes == Outcomes(opened=2, cancelled=1)
    assert (await play.finish())[0] == answer("two one")


async def test_another_request_cancels_the_session(play: Play) -> None:
    await play.prepare("one two three", **LIMITED)
    assert (await play.create("four", **LIMITED))[0] == answer("four")
    assert play.outcomes == Outcomes(opened=1, cancelled=1)
    with pytest.raises(SocketError, match="No response is open"):
        await play.append("more")


async def test_other_sampling_cancels_the_session(play: Play) -> None:
    name = await play.prepare("one two three", **LIMITED)
    await play.create("four", name, max_output_tokens=8)
    assert play.outcomes == Outcomes(opened=1, cancelled=1)


@pytest.mark.parametrize("trouble", ["refuses_sessions", "refuses_appends", "refuses_finish"])
async def test_a_cluster_without_sessions_gives_the_same_answer(play: Play, trouble: str) -> None:
    setattr(play.cluster, trouble, True)
    await play.prepare("one two three", **LIMITED)
    await play.append(" four five six")
    assert (await play.finish(" seven"))[0] == answer("one two three four five six seven")
    assert play.cluster.answered_plainly == 1


async def test_a_session_that_is_lost_in_the_midst_of_its_answer_fails_it(play: Play) -> None:
    play.cluster.loses_sessions = True
    await play.prepare("one two three", **LIMITED)
    with pytest.raises(SocketError, match="the router is gone"):
        await play.finish()
    play.cluster.loses_sessions = False
    assert (await play.finish())[0] == answer("one two three"), "its input is still open"


async def test_a_change_that_is_refused_changes_nothing(play: Play) -> None:
    await play.prepare("one", **LIMITED)
    with pytest.raises(SocketError, match="too long"):
        await play.append("x" * 5000)
    assert (await play.finish(" two"))[0] == answer("one two")


async def test_an_input_that_comes_in_many_pieces_is_as_large_as_one_event_may_be() -> None:
    play = Play(max_bytes=600)
    play.renderer.cuts_off = True
    await play.prepare("x" * 300, **LIMITED)
    with pytest.raises(SocketError, match=r"would have 6\d\d bytes as JSON, and 600 at most") as refused:
        for _ in range(10):
            await play.append("é" * 50)
    assert (refused.value.code, refused.value.param) == ("conversation_too_large", "input")
    with pytest.raises(SocketError, match="at most"):
        await play.finish("x" * 300)
    _, name = await play.finish()
    for again in (play.create, play.prepare):
        with pytest.raises(SocketError, match="at most"):
            await again("x" * 300, name)
    await play.create("x" * 300)
    await play.talk.close()


async def test_a_stored_response_is_found_by_another_connection(play: Play) -> None:
    store = Store()
    one, other = Play(store), Play(store)
    first, name = await one.create("a")
    assert (await other.create("b", name))[0] == answer("a", first, "b")
    _, unstored = await one.create("a", store=False)
    with pytest.raises(SocketError, match="not found"):
        await other.create("b", unstored)
    await one.create("b", unstored)


async def test_while_the_store_is_away_answers_come_and_what_is_stored_is_refused_for_a_while() -> None:
    store = Store()
    store.is_away = True
    play = Play(store)
    _, name = await play.create("a")
    await play.create("b", name)
    with pytest.raises(SocketError) as refused:
        await Play(store).create("b", name)
    assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "1"})


@pytest.mark.parametrize("seed", seeds(40, few=15))
async def test_random_pieces_give_the_answer_of_the_whole(play: Play, seed: int) -> None:
    rng = random.Random(seed)
    fields = LIMITED if rng.random() < 0.7 else {}
    previous, turns = None, list[str]()
    for _ in range(rng.randint(1, 3)):
        text = piece(rng)
        await play.prepare(text, previous, **fields)
        for _ in range(rng.randint(0, 5)):
            for trouble in ("refuses_sessions", "refuses_appends", "refuses_finish"):
                setattr(play.cluster, trouble, rng.random() < 0.1)
            if rng.random() < 0.25:
                text = text[: rng.randint(0, len(text))] + piece(rng)
                await play.ask(Update(items_of(text)))
            else:
                text += (more := piece(rng)) or "x"
                await play.append(more or "x")
        text += (closing := piece(rng))
        said, previous = await play.finish(closing)
        turns.append(text)
        assert said == answer(*turns)
        turns.append(said)


def piece(rng: random.Random) -> str:
    return "".join(rng.choice("abé \n") for _ in range(rng.randint(0, 30)))
