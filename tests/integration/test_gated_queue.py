"""The gated queue beside vLLM's own, and what a closed gate shows."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request

from decode_worker.gated_queue import GatedQueue
from tests.planting import planted
from tests.state_machines import expect_noticed

pytestmark = pytest.mark.integration


def new_request(name: str) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=1), None)


class GatedQueueMachine(RuleBasedStateMachine):
    """shown: what a step may still see, in its order; None while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        first = [new_request(f"first{number}") for number in range(2)]
        self.stock = FCFSRequestQueue(first)
        self.gated = GatedQueue(first)
        self.shown: list[Request] | None = None
        self.popped: list[Request] = []

    def both(self, what: Callable[[Any], None]) -> None:
        what(self.gated)
        what(self.stock)

    @rule()
    def add(self) -> None:
        request = new_request(str(next(self.numbers)))
        self.both(lambda queue: queue.add_request(request))

    @rule()
    def prepend(self) -> None:
        request = new_request(str(next(self.numbers)))
        self.both(lambda queue: queue.prepend_request(request))

    @precondition(lambda self: self.popped)
    @rule()
    def put_back_what_was_popped(self) -> None:
        self.both(lambda queue: queue.prepend_requests(self.popped))
        self.popped = []

    @precondition(lambda self: self.stock)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.stock)))
        self.both(lambda queue: queue.remove_request(request))
        self.forget([request])

    @rule(data=st.data())
    def remove_several(self, data: st.DataObject) -> None:
        stranger = new_request("stranger")
        requests = data.draw(st.lists(st.sampled_from([*self.stock, stranger]), unique=True, max_size=3))
        self.both(lambda queue: queue.remove_requests(requests))
        self.forget(requests)

    def forget(self, requests: list[Request]) -> None:
        if self.shown is not None:
            self.shown = [each for each in self.shown if each not in requests]

    @rule()
    def remove_nobody(self) -> None:
        with pytest.raises(ValueError, match="stranger"):
            self.gated.remove_request(new_request("stranger"))

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        waiting = list(self.stock)
        self.shown = data.draw(st.lists(st.sampled_from(waiting), unique=True, max_size=4)) if waiting else []
        self.gated.close([each.request_id for each in self.shown])

    @rule()
    def open(self) -> None:
        self.shown = None
        self.gated.open()

    @rule()
    def pop(self) -> None:
        visible = list(self.stock) if self.shown is None else self.shown
        if not visible:
            with pytest.raises(IndexError):
                self.gated.pop_request()
            return
        request = visible[0]
        assert self.gated.pop_request() is request
        self.stock.remove_request(request)
        self.forget([request])
        self.popped.insert(0, request)

    @invariant()
    def is_the_stock_queue(self) -> None:
        assert list(self.gated) == list(self.stock)
        assert len(self.gated) == len(self.stock)
        visible = list(self.stock) if self.shown is None else self.shown
        assert bool(self.gated) == bool(visible)
        if visible:
            assert self.gated.peek_request() is visible[0]
        else:
            with pytest.raises(IndexError):
                self.gated.peek_request()


TestGatedQueue = GatedQueueMachine.TestCase
TestGatedQueue.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_gate_that_opens_when_all_shown_are_taken_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_true = GatedQueue.__bool__
    planted(monkeypatch, GatedQueue, "__bool__", lambda self: is_true(self) or self._shown == [])
    expect_noticed(GatedQueueMachine)


def test_a_gate_in_the_wrong_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, GatedQueue, "close", lambda self, shown: setattr(self, "_shown", list(shown)))
    expect_noticed(GatedQueueMachine)
