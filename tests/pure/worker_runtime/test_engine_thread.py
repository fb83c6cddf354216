"""What whoever asks an engine's thread how it is hears of a command that it is in; run on the test's own thread."""

from types import SimpleNamespace
from typing import Any, cast

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
