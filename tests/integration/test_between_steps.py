"""What has been pulled or loaded is looked for before each step, and computes in it.

Real schedulers without a model (`simulated`), whose runner lands what is pulled some steps late; and the look itself,
over stand-ins.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.request import RequestStatus

from cluster_configs.schema import RachisConfig
from cluster_core.clock import ClusterClock
from decode_worker.batch_settings import BatchSettings
from kv_transfer import vllm_private
from kv_transfer.between_steps import LookingStep, look_before_steps
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine
from tests.campaign.fuzz.worlds import World
from tests.engine_process import in_engine_process
from tests.integration.test_streaming_fairness import numbered
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment

pytestmark = pytest.mark.integration

PROMPT = numbered(3, 10 * BLOCK_SIZE)
_NOTHING = KVConnectorTransferResults(finished_sending=set(), finished_recving=set(), failed_recving=set())


def first_step(world: World) -> int:
    """Of a request whose prompt is pulled beside another one that decodes: how many steps after it has come."""
    engine = SimulatedEngine(world)
    engine.add("decodes", numbered(7, 40), max_tokens=40)
    for _ in range(4):
        engine.turn()
    engine.outputs.clear()
    engine.remote_tokens["pulled"] = len(PROMPT) - 1
    engine.add("pulled", PROMPT, max_tokens=3)
    engine.drain()
    assert engine.answers["pulled"] == expected_tokens(PROMPT, 3)
    engine.check_idle()
    scheduled = [output.num_scheduled_tokens for output in engine.outputs]
    first = next(number for number, step in enumerate(scheduled) if "pulled" in step)
    assert all("decodes" in step for step in scheduled[: first + 1]), "nobody waits for it"
    return first


@pytest.mark.parametrize("depth", [1, 2], ids=["one step at a time", "two at once"])
@pytest.mark.parametrize("decode", [None, BatchSettings(chunk_tokens=BLOCK_SIZE)], ids=["streaming", "decode"])
def test_what_lands_computes_as_many_steps_sooner_as_are_in_flight(decode: BatchSettings | None, depth: int) -> None:
    asked, looked = (first_step(World(blocks=101, depth=depth, decode=decode, looks=looks)) for looks in (False, True))
    assert looked == asked - depth


class Connector:
    """A worker's side that has these results."""

    def __init__(self, results: KVConnectorTransferResults) -> None:
        self.results = results

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        assert not finished
        return self.results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def get_kv_connector_stats(self) -> None:
        return

    def build_connector_worker_meta(self) -> None:
        return


class Scheduler:
    """Requests that wait in this state; what it is told, and what it makes of that."""

    def __init__(self, *states: RequestStatus, makes: Any = None) -> None:
        self.kv_holding_waiting = [SimpleNamespace(request_id=str(n), status=each) for n, each in enumerate(states)]
        self.finished_recving_kv_req_ids: set[str] = set()
        self.connector = SimpleNamespace(has_untold_leases=False)
        self.makes = makes or {}
        self.told: list[Any] = []

    def update_from_output(self, step: Any, output: Any) -> Any:
        assert not step.total_num_scheduled_tokens and not output.req_ids
        self.told.append(output.kv_connector_output)
        return self.makes


LANDED = KVConnectorTransferResults(finished_sending={"other"}, finished_recving={"0"}, failed_recving=set())
WAITS = RequestStatus.WAITING_FOR_REMOTE_KVS


def test_what_has_landed_is_told_before_the_step() -> None:
    scheduler = Scheduler(WAITS, makes={0: SimpleNamespace(outputs=[])})
    step = LookingStep(scheduler, Connector(LANDED), lambda: ({7: len(scheduler.told)}, True))
    assert step() == ({7: 1}, True)
    assert (scheduler.told[0].finished_recving, scheduler.told[0].finished_sending) == ({"0"}, {"other"})


def test_who_has_failed_by_it_is_told_before_anybody_computes() -> None:
    scheduler = Scheduler(WAITS, makes={0: SimpleNamespace(outputs=["failed"])})
    step = LookingStep(scheduler, Connector(LANDED), lambda: pytest.fail("it has stepped"))
    assert step() == (scheduler.makes, False)


@pytest.mark.parametrize("scheduler", [Scheduler(), Scheduler(RequestStatus.WAITING)])
def test_where_nobody_waits_for_kv_nothing_is_looked_for(scheduler: Scheduler) -> None:
    assert LookingStep(scheduler, None, lambda: (None, True))() == (None, True)
    scheduler = Scheduler(WAITS)
    scheduler.finished_recving_kv_req_ids.add("0")
    assert LookingStep(scheduler, None, lambda: (None, True))() == (None, True)


def test_before_workers_know_all_leases_nothing_is_looked_for() -> None:
    scheduler = Scheduler(WAITS)
    scheduler.connector.has_untold_leases = True
    assert LookingStep(scheduler, None, lambda: (None, True))() == (None, True)


def test_where_nothing_has_landed_the_scheduler_is_told_nothing() -> None:
    scheduler = Scheduler(WAITS)
    assert LookingStep(scheduler, Connector(_NOTHING), lambda: ({}, True))() == ({}, True)
    assert not scheduler.told


def test_an_engine_whose_worker_is_here_looks_before_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM has one connector for a process, which no engine has made here.
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", Connector(LANDED))
    scheduler = Scheduler(WAITS, makes={0: SimpleNamespace(outputs=[])})
    core = SimpleNamespace(scheduler=scheduler, step_fn=lambda: ({}, True))
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    look_before_steps(SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), vllm_config=config))
    assert core.step_fn() == ({}, True)
    assert scheduler.told[0].finished_recving == {"0"}


def test_an_engine_whose_workers_are_processes_of_their_own_is_left_as_it_is() -> None:
    core = SimpleNamespace(scheduler=None, step_fn=None)
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    look_before_steps(SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), vllm_config=config))
    assert core.step_fn is None


def test_an_engine_that_has_been_brought_up_looks_and_holds_back_for_a_hand_over_until_its_next_step() -> None:
    assert in_engine_process(_brought_up_and_stepped) == (LookingStep, False)


def _brought_up_and_stepped() -> tuple[type, bool]:
    """What steps a decode worker's engine, and whether it still holds back looks after a step after a hand-over."""
    from vllm import SamplingParams

    from worker_runtime.vllm_start import bring_up_vllm

    config = RachisConfig()
    settings = EngineSettings(config.model, config.engine, config.handoff, EngineRole.DECODE)
    os.environ.update(engine_environment(settings))
    engine = bring_up_vllm(settings, ClusterClock(), lambda phase: None, lambda call: None).engine
    connector = vllm_private.connector_of(engine)
    connector.has_untold_leases = True
    engine.add_request("next", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=1))
    engine.step()
    return type(engine.engine_core.engine_core.step_fn), connector.has_untold_leases
