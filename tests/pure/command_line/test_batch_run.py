"""How a batch sends its requests: again where that may help, once where it cannot, and never beyond its time."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import httpx
import pytest

from command_line.batches.batch_file import BatchAnswer, BatchRequest
from command_line.batches.batch_run import BatchRun, Reply
from command_line.batches.batch_terms import BatchFigures, BatchLimits
from command_line.batches.over_http import sender


class World:
    """A service that answers by a plan, and a clock that only pauses move."""

    def __init__(
        self, reply: Callable[[str, int], Reply], concurrency: int = 2, tries: int = 3, try_s: float = 50.0
    ) -> None:
        self._reply = reply
        self.now_s = 0.0
        self.tries: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.answers: dict[str, BatchAnswer] = {}
        self.pauses: list[float] = []
        # Requests whose service is frozen.
        self.silent: set[str] = set()
        # Sentences, with when each was said.
        self.said: list[tuple[float, str]] = []
        self.batch = BatchRun(
            self._send,
            BatchLimits(concurrency, tries, try_s, 100.0),
            self._done,
            lambda: self.now_s,
            self._sleep,
            random.Random(1),
            say=lambda sentence: self.said.append((self.now_s, sentence)),
        )

    def play(self, *names: str) -> BatchFigures:
        return asyncio.run(self.batch.run([BatchRequest(name, "/v1/completions", {}) for name in names]))

    async def _send(self, request: BatchRequest) -> Reply:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await (asyncio.Event().wait() if request.custom_id in self.silent else asyncio.sleep(0))
        self.at_once -= 1
        self.tries[request.custom_id] += 1
        return self._reply(request.custom_id, self.tries[request.custom_id])

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    def _done(self, request: BatchRequest, answer: BatchAnswer) -> None:
        assert request.custom_id not in self.answers
        self.answers[request.custom_id] = answer


# Of a try that reached nobody.
GONE = Reply(BatchAnswer(code="unreachable", message="nobody listens"))


def status(code: int, retry_after_s: float | None = None) -> Reply:
    return Reply(BatchAnswer(code, {}), retry_after_s)


def test_each_request_is_answered_once_and_no_more_run_than_may() -> None:
    world = World(lambda name, tried: status(200), concurrency=3)
    figures = world.play(*map(str, range(20)))
    assert figures == BatchFigures(answered=20)
    assert world.most_at_once == 3 and set(world.tries.values()) == {1}


@pytest.mark.parametrize("code", [429, 503, 0])
def test_a_service_that_is_full_or_gone_is_asked_again_for_as_long_as_the_batch_has(code: int) -> None:
    world = World(lambda name, tried: status(200) if tried > 5 else status(code))
    assert world.play("a") == BatchFigures(answered=1, tried_again=5)
    assert world.pauses == sorted(world.pauses), "later and later"


def test_the_service_says_when_to_come_back() -> None:
    world = World(lambda name, tried: status(200) if tried > 1 else status(429, 7.0))
    world.play("a")
    assert world.pauses == [7.0]


@pytest.mark.parametrize("code", [500, 502, 504])
def test_what_the_service_fails_at_is_tried_a_few_times(code: int) -> None:
    world = World(lambda name, tried: status(code), tries=4)
    assert world.play("a") == BatchFigures(failed=1, tried_again=3)
    assert world.tries["a"] == 4 and world.answers["a"].status == code


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_what_can_never_work_is_tried_once(code: int) -> None:
    world = World(lambda name, tried: status(code))
    assert world.play("a") == BatchFigures(failed=1)


def test_at_the_end_of_its_time_what_is_left_has_expired_and_says_of_what() -> None:
    world = World(lambda name, tried: GONE if name == "b" else status(200), concurrency=1)
    figures = world.play("a", "b", "c")
    assert (figures.answered, figures.failed, figures.expired) == (1, 2, 2)
    assert world.now_s == pytest.approx(100.0)
    assert world.answers["b"].code == "batch_expired" and "nobody listens" in world.answers["b"].message
    assert world.tries["c"] == 0


def test_a_service_that_is_not_there_is_said_once_at_the_first_try_and_again_when_it_answers() -> None:
    world = World(lambda name, tried: status(200) if tried > 4 else GONE)
    world.play("a", "b", "c")
    (first_s, gone), (second_s, back) = world.said
    assert gone == "does not answer: nobody listens; it is asked again, every 30 s in the end" and first_s == 0.0
    assert back == "answers again" and second_s > 0.0


def test_a_connection_that_breaks_beside_others_that_hold_is_not_said() -> None:
    world = World(lambda name, tried: GONE if name == "b" and tried < 3 else status(200), concurrency=1)
    assert world.play("a", "b", "c").answered == 3 and world.said == []


def test_a_service_that_goes_away_is_said_once_nobody_has_answered_for_the_longest_pause() -> None:
    world = World(lambda name, tried: status(200) if name == "a" or world.now_s > 70.0 else GONE, concurrency=1)
    assert world.play("a", "b").answered == 2
    (gone_s, _), (_, back) = world.said
    assert 30.0 <= gone_s <= 60.0 and back == "answers again"


def test_a_service_that_is_full_is_there() -> None:
    full = World(lambda name, tried: status(200) if tried > 3 else status(503))
    full.play("a")
    assert full.said == []


async def test_requests_are_best_effort_unless_they_say_otherwise() -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        return httpx.Response(429, json={"error": {}}, headers={"retry-after-ms": "250", "retry-after": "1"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://gateway") as client:
        send = sender(client, 1)
        reply = await send(BatchRequest("a", "/v1/completions", {"prompt": "x"}))
        await send(BatchRequest("b", "/v1/completions", {"prompt": "x", "priority": 0}))
    assert bodies == [b'{"priority":1,"prompt":"x"}', b'{"priority":0,"prompt":"x"}']
    assert reply == Reply(BatchAnswer(429, {"error": {}}), 0.25)


async def test_an_answer_that_is_no_json_and_a_connection_that_breaks_are_told() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/responses":
            raise httpx.ConnectError("refused")
        return httpx.Response(502, text="<html>")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://gateway") as client:
        send = sender(client, 1)
        proxied = await send(BatchRequest("a", "/v1/completions", {}))
        broken = await send(BatchRequest("b", "/v1/responses", {}))
    assert proxied.answer.status == 502 and "<html>" in str(proxied.answer.body)
    assert broken.answer.status == 0 and "refused" in broken.answer.message
