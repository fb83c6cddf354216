"""The adapters of running requests are those that a look at all of them finds, and each request is looked at once."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.running_adapters import RunningAdapters


class Request:
    """Counts how often somebody looks at its adapter; 0: it has none."""

    looks = 0

    def __init__(self, adapter: int) -> None:
        self.adapter = adapter

    @property
    def lora_request(self) -> Any:
        Request.looks += 1
        return SimpleNamespace(lora_int_id=self.adapter) if self.adapter else None


def test_in_a_step_each_running_request_is_looked_at_once_however_many_wait() -> None:
    adapters, running, Request.looks = RunningAdapters(), [Request(each % 5) for each in range(512)], 0
    for number in range(5000):
        found = adapters.of(running)
        if number % 100 == 0:
            # vLLM admits one.
            running.append(Request(1))
    assert found == {1, 2, 3, 4}
    # What has no adapter is looked at once, what has one twice.
    assert Request.looks <= 2 * len(running)


changes = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 4)),
    st.tuples(st.just("remove"), st.integers(0, 30)),
    st.tuples(st.sampled_from(["pop", "other list", "sort", "look"]), st.just(0)),
)


@given(st.lists(changes, max_size=60))
def test_it_is_what_a_look_at_all_of_them_finds_whatever_has_come_and_gone_meanwhile(
    played: list[tuple[str, int]],
) -> None:
    adapters, running = RunningAdapters(), list[Request]()
    for change, number in played:
        match change:
            case "append":
                running.append(Request(number))
            case "remove" if running:
                del running[number % len(running)]
            case "pop" if running:
                running.pop()
            case "other list":
                running = running[1:]
            case "sort":
                running = sorted(running, key=id)
            case "look":
                assert adapters.of(running) == {each.adapter for each in running} - {0}
    assert adapters.of(running) == {each.adapter for each in running} - {0}
