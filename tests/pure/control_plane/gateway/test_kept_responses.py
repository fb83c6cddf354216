"""The responses that a connection goes on from: the latest ones, as the conversation that one request would send."""

import random
from typing import Any

import pytest

from control_plane.gateway.kept_responses import KeptResponse, KeptResponses, kept


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": [{"token": "a"}]}]
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": content if text else []}


def test_a_response_is_kept_as_the_conversation_to_its_end() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    response = kept("resp_1", [user("a")], [answer("b"), call])
    assert [item["type"] for item in response.items] == ["message", "message", "function_call"]
    assert response.items[1]["content"] == [{"type": "output_text", "text": "b", "annotations": []}]
    assert response.size_bytes > 100


def test_an_answer_without_text_is_no_item_of_an_input() -> None:
    assert kept("resp_1", [user("a")], [answer("")]).items == (user("a"),)


def test_the_oldest_go_first() -> None:
    memory = KeptResponses(2, 10_000)
    for name in "abc":
        memory.add(kept(name, [user(name)]))
    assert (memory.get("a"), len(memory)) == (None, 2)
    found = memory.get("c")
    assert found is not None
    assert found.items == (user("c"),)
    memory.check_invariants()


def test_one_that_is_kept_again_is_the_latest() -> None:
    memory = KeptResponses(2, 10_000)
    for name in ("a", "b", "a", "c"):
        memory.add(kept(name, [user(name)]))
    assert memory.get("a") is not None
    assert memory.get("b") is None


def test_the_latest_stays_whatever_its_size() -> None:
    memory = KeptResponses(5, 100)
    memory.add(KeptResponse("a", (), 60))
    memory.add(KeptResponse("b", (), 600))
    assert [memory.get(name) is not None for name in "ab"] == [False, True]
    memory.check_invariants()


@pytest.mark.parametrize("seed", range(5))
def test_neither_limit_is_ever_passed(seed: int) -> None:
    rng = random.Random(seed)
    memory = KeptResponses(rng.randint(1, 6), rng.randint(1, 300))
    for _ in range(300):
        name = f"resp_{rng.randrange(9)}"
        if rng.random() < 0.2:
            memory.remove(name)
        else:
            memory.add(KeptResponse(name, (), rng.randint(0, 200)))
            assert memory.get(name) is not None
        memory.check_invariants()
