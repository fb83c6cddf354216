"""What whoever asks an engine's thread how it is hears of a command that it is in; run on the test's own thread."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster_core.engine_reports import EngineStatus
from cluster_core.heartbeat import COMMAND_S, Heartbeat
from worker_runtime.engine_thread import EngineThread, Reports
from worker_runtime.engine_work import EngineWork


def nothing(*_: Any) -> None:
    return


def idle_work() -> EngineWork:
    """As much of it as turns without requests take."""
    work: Any = SimpleNamespace(
        info=None,
        figures=SimpleNamespace(status=EngineStatus()),
        jobs=SimpleNamespace(report_progress=nothing),
        has_requests=lambda: False,
        publish_status=nothing,
        die=nothing,
        shut_down=nothing,
    )
    return cast(EngineWork, work)


def test_an_engine_whose_command_does_not_come_back_hangs_and_works_again_once_it_has() -> None:
    """An adapter's folder lies on a disk that does not answer, say."""
    now_s = 0.0
    thread = EngineThread(lambda on_phase, on_loop: idle_work())
    thread.heartbeat = Heartbeat(lambda: now_s)
    stalled_s: list[float] = []

    def look(work: EngineWork) -> None:
        stalled_s.append(thread.status().load.stalled_s)

    def hang(work: EngineWork) -> None:
        nonlocal now_s
        now_s += COMMAND_S - 1.0
        look(work)
        now_s += 2.0
        look(work)

    for command in (hang, look, lambda work: thread.ask_to_stop()):
        thread.put(command)
    thread.run(Reports(on_loop=nothing, up=nothing, failed=nothing, phase=nothing, death=nothing))

    assert stalled_s == [0.0, COMMAND_S + 1.0, 0.0]


class HeldWork:
    """Has requests, and nothing to compute: it would nap for a minute."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self.steps = 0
        self._on_step = on_step
        idle: Any = idle_work()
        self.info, self.figures, self.jobs = idle.info, idle.figures, idle.jobs
        self.die, self.shut_down = idle.die, idle.shut_down

    def has_requests(self) -> bool:
        return True

    def step(self) -> None:
        self.steps += 1
        self._on_step()

    def copying_since_s(self) -> None:
        return None

    def nap_s(self) -> float:
        return 60.0


def test_a_command_ends_the_nap_of_an_engine_that_has_nothing_to_compute() -> None:
    def come() -> None:
        thread.put(lambda of: thread.ask_to_stop() if work.steps == 3 else None)

    work = HeldWork(come)
    thread = EngineThread(lambda on_phase, on_loop: cast(EngineWork, work))
    thread.run(Reports(on_loop=nothing, up=nothing, failed=nothing, phase=nothing, death=nothing))
    assert work.steps == 3


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (SimpleNamespace(running=[]), True),
        (SimpleNamespace(running=["s"]), False),
        (SimpleNamespace(running=["s"], held_nap_s=0.0), False),
        # Computed up to here, and held back now.
        (SimpleNamespace(running=["s"], held_nap_s=0.02), True),
    ],
)
def test_an_engine_naps_while_it_has_nothing_to_compute(scheduler: Any, expected: bool) -> None:
    work: Any = SimpleNamespace(_scheduler=scheduler)
    assert bool(EngineWork.nap_s(work)) is expected
