"""An engine in a process of its own: whoever waits for it gets an answer when that ends or hangs, and it stays behind
nobody.

No vLLM is imported; that such an engine keeps what engines promise is asked in `tests/contract`.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

from cluster_configs.schema import RachisConfig
from cluster_core import event_log
from cluster_core.clock import ClusterClock, monotonic_s, unix_s
from cluster_core.engine_jobs import EngineJob, SamplingSpec
from cluster_core.engine_reports import DecodeBatch, PrefixClaimChange, PrefixClaims
from cluster_core.errors import StartError, UnavailableError
from tests.fakes.cluster import until
from tests.fakes.idle_engine import COPY, DIE, FORK, HANG, INFO, LOG, NO_MODEL, TIME
from worker_runtime import engine_process
from worker_runtime.engine_messages import Frame, encoded
from worker_runtime.engine_process import EngineProcess
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.vllm_engine import VllmEngine

JOB = EngineJob("job-1", (1, 2, 3), SamplingSpec())


def settings_of(model: str = "m") -> EngineSettings:
    config = RachisConfig.model_validate({"model": {"name": model}})
    return EngineSettings(config.model, config.engine, config.handoff, EngineRole.ALONE)


class Trial:
    """An engine that has not started yet."""

    def __init__(self, model: str = "m") -> None:
        self.clock = ClusterClock()
        settings = settings_of(model)
        self.core = EngineProcess(settings, self.clock, module="tests.fakes.idle_engine")
        self.engine = VllmEngine(settings, core=self.core)
        self.phases: list[str] = []
        self.deaths: list[str] = []

    async def start(self) -> None:
        assert await self.engine.start(self.phases.append, self.deaths.append) == INFO

    @property
    def pid(self) -> int:
        # Whose process is not told to anybody: tests end it.
        assert self.core._process is not None
        return self.core._process.pid


@pytest.fixture
async def trial() -> AsyncIterator[Trial]:
    trial = Trial()
    yield trial
    await trial.engine.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # So that the test need not wait for as long as a busy machine may be silent.
    monkeypatch.setattr(engine_process, "_SILENT_S", 0.8)
    yield


async def test_it_tells_what_it_is_doing_and_what_it_is(trial: Trial) -> None:
    await trial.start()

    assert trial.phases == ["resting"]
    await trial.engine.release("r#1")
    await until(lambda: trial.engine.status().load.total_blocks == 9)
    assert trial.engine.status().load.free_blocks == 9


async def test_what_was_asked_before_it_started_is_answered(trial: Trial) -> None:
    waiting = asyncio.ensure_future(trial.engine.release("r#1"))
    await asyncio.sleep(0)
    await trial.start()

    async with asyncio.timeout(60):
        assert await waiting is False


async def test_whoever_waits_when_its_process_is_killed_gets_an_answer(trial: Trial) -> None:
    await trial.start()
    waiting = [
        asyncio.ensure_future(trial.engine.hottest_prefixes(HANG)),
        asyncio.ensure_future(trial.engine.decode_batch(1)),
        asyncio.ensure_future(trial.engine.prefix_claims()),
        asyncio.ensure_future(trial.engine.hand_over("job-1")),
        asyncio.ensure_future(anext(trial.engine.generate(JOB))),
    ]
    await asyncio.sleep(0.1)
    os.kill(trial.pid, signal.SIGKILL)

    async with asyncio.timeout(60):
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: bool(trial.deaths))

    assert answers[:4] == [(), DecodeBatch(), PrefixClaims(), False]
    assert isinstance(answers[4], UnavailableError)
    assert str(answers[4]) == "the engine died: its process ended with -9"
    assert trial.deaths == ["its process ended with -9"]


async def test_after_the_death_of_its_process_everything_is_answered(trial: Trial) -> None:
    await trial.start()
    os.kill(trial.pid, signal.SIGKILL)
    await until(lambda: bool(trial.deaths))

    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError, match="its process ended with -9"):
            await anext(trial.engine.generate(JOB))
        assert await trial.engine.release("r#1") is False
        assert await trial.engine.hottest_prefixes(5) == ()
    assert not trial.engine.status().load.stalled_s


async def test_an_engine_that_raises_in_a_step_tells_so_once_and_answers_still(trial: Trial) -> None:
    await trial.start()
    await trial.engine.hottest_prefixes(DIE)
    await until(lambda: bool(trial.deaths))

    with pytest.raises(UnavailableError, match="ZeroDivisionError: of a test"):
        await anext(trial.engine.generate(JOB))
    await trial.engine.stop()
    assert trial.deaths == ["ZeroDivisionError: of a test"]


async def test_a_process_that_is_stopped_hangs_until_it_goes_on(trial: Trial, impatient: None) -> None:
    await trial.start()
    os.kill(trial.pid, signal.SIGSTOP)
    await until(lambda: trial.engine.status().load.stalled_s > 0.8)

    os.kill(trial.pid, signal.SIGCONT)
    await until(lambda: not trial.engine.status().load.stalled_s)
    assert trial.deaths == []


async def test_copies_that_do_not_end_there_hang_here(trial: Trial) -> None:
    await trial.start()
    await trial.engine.hottest_prefixes(COPY)
    await until(lambda: trial.engine.status().load.stalled_s > 50.0)


async def test_its_time_is_the_services(trial: Trial) -> None:
    """That of a Redis whose clock is an hour ahead, also when that is learned late."""
    await trial.start()
    for ahead_s in (3600.0, 7200.0):
        now_s = monotonic_s()
        trial.clock.measured(unix_s() + ahead_s, now_s, now_s)
        (told,) = await trial.engine.hottest_prefixes(TIME)
        assert abs(int(told.hash) / 1000 - trial.clock.unix_s()) < 60.0


async def test_what_asks_a_services_processes_to_end_is_for_its_worker(trial: Trial) -> None:
    """Whose engine is still needed while it drains."""
    await trial.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(trial.pid, number)

    assert await trial.engine.release("r#1") is False
    assert trial.deaths == []


async def test_what_is_raised_while_it_starts_is_why_it_did_not() -> None:
    trial = Trial(NO_MODEL)
    with pytest.raises(StartError, match="the engine did not start: ValueError: no model"):
        await trial.start()
    # Once its process has ended.
    assert await trial.engine.release("r#1") is False
    assert trial.deaths == [], "its worker tells why it did not start, before it ends"
    await trial.engine.stop()


async def test_one_that_ends_before_it_is_up_did_not_start(trial: Trial) -> None:
    core = EngineProcess(settings_of(), trial.clock, module="tests.fakes.nothing_of_that_name")
    with pytest.raises(StartError, match="its process ended with 1"):
        await core.start(trial.phases.append, trial.deaths.append)
    await core.stop()


async def test_a_job_of_a_stopped_engine_is_unavailable(trial: Trial) -> None:
    waiting = asyncio.ensure_future(anext(trial.engine.generate(JOB)))
    await asyncio.sleep(0)
    await trial.engine.stop()

    with pytest.raises(UnavailableError, match="it was stopped"):
        await waiting
    with pytest.raises(StartError, match="it was stopped"):
        await trial.start()


async def test_what_it_logs_is_logged_by_its_worker(trial: Trial, caplog: pytest.LogCaptureFixture) -> None:
    await trial.start()
    with caplog.at_level(logging.ERROR):
        await trial.engine.hottest_prefixes(DIE)
        await until(lambda: bool(trial.deaths))

    (logged,) = [each for each in caplog.records if each.name == "worker_runtime.engine_thread"]
    event = event_log.event_of(logged, "s", "w")
    assert (event.level, event.message) == ("ERROR", "the engine died in a step")
    assert event.exception.endswith("ZeroDivisionError: of a test")


async def test_what_libraries_say_below_a_warning_is_not_logged_there_either(
    trial: Trial, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing of a record that cannot travel keeps it, or anything else, from coming."""
    with caplog.at_level(logging.INFO), caplog.at_level(logging.INFO, logger="worker_runtime"):
        await trial.start()
        await trial.engine.hottest_prefixes(LOG)

    (logged,) = [each for each in caplog.records if each.getMessage().startswith("of ")]
    assert (logged.name, logged.__dict__["request_id"]) == ("worker_runtime", "r-1")


async def test_a_fork_of_its_process_does_not_hide_its_end(trial: Trial, capfd: pytest.CaptureFixture[str]) -> None:
    await trial.start()
    await trial.engine.hottest_prefixes(FORK)
    os.kill(trial.pid, signal.SIGKILL)
    await until(lambda: bool(trial.deaths), timeout_s=15.0)
    # Which the fork says itself, whenever it is its turn.
    await until(lambda: "a rank of the engine" in capfd.readouterr().err, timeout_s=15.0)


async def test_a_follower_that_raises_ends_nothing(trial: Trial) -> None:
    def raises(change: PrefixClaimChange) -> None:
        raise ZeroDivisionError

    trial.engine.follow_claims(raises)
    await trial.start()
    assert await trial.engine.release("r#1") is False
    assert trial.deaths == []


async def test_each_follower_hears_first_what_there_is(trial: Trial) -> None:
    await trial.start()
    heard: list[str] = []
    trial.engine.follow_claims(lambda change: heard.append("first"))
    trial.engine.follow_claims(lambda change: heard.append("second"))
    await trial.engine.release("r#1")
    assert heard in (["second"], ["first", "second"])


async def test_a_start_that_is_given_up_leaves_no_process(trial: Trial) -> None:
    starting = asyncio.ensure_future(trial.start())
    await asyncio.sleep(0)
    process = psutil.Process(trial.pid)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await trial.engine.stop()
    assert not process.is_running()


async def test_others_have_their_turns_while_it_says_more_than_is_received_at_once(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a few messages are many times as much as that.
    monkeypatch.setattr(engine_process, "_READ_BYTES", 16)
    frames = 50 * encoded(Frame([("phase", "busy")]))
    own, its = socket.socketpair()
    own.setblocking(False)
    with own, its:
        its.sendall(frames)
        its.shutdown(socket.SHUT_WR)
        # What an engine's process says comes from nowhere else.
        reading = asyncio.create_task(trial.core._read(own))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
    assert turns >= len(frames) / 16


_WORKER = """
import asyncio
from tests.process.worker_runtime.test_engine_process import Trial

async def main():
    trial = Trial()
    await trial.start()
    print(trial.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_it_ends_with_its_worker_however_that_ends() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER], stdout=subprocess.PIPE, env=environment, text=True
    ) as worker:
        assert worker.stdout is not None
        engine = psutil.Process(int(worker.stdout.readline()))
        worker.kill()

    engine.wait(60)
