"""What an engine's process has to say goes together, as its steps have made it."""

from worker_runtime.engine_child import Outbox


def test_what_one_call_of_the_engine_makes_goes_together_and_in_order() -> None:
    outbox = Outbox()

    def step() -> None:
        for number in range(3):
            outbox.add("made", number)

    outbox.put("phase", "up")
    outbox.together(step)
    outbox.put("answer", 1)

    assert outbox.take(0.0) == [("phase", "up"), ("made", 0), ("made", 1), ("made", 2), ("answer", 1)]
    assert outbox.take(0.0) == []


def test_a_call_that_makes_nothing_sends_nothing() -> None:
    outbox = Outbox()
    outbox.together(lambda: None)
    assert outbox.take(0.0) == []
