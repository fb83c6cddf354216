"""The service over imitated GPUs beside the simulator, as `rachis bench simulator` sets them: a small comparison."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from rachis import AsyncClient

from benchmarks.system_grid_service import STUDY, Load, Service, answered, judged
from benchmarks.validation import imitated
from benchmarks.validation.cluster import Cluster, Prompt
from cluster_configs import loading
from command_line.doctor.checks import CHECKS
from command_line.doctor.collecting import look
from command_line.doctor.findings import Severity, examine
from command_line.own_service import Target
from tests.integration.conftest import own_service

pytestmark = pytest.mark.integration

# A fast GPU: nothing here is about time. One worker of each pool: what is found in a cache is no matter of chance.
FLAGS = {
    **imitated.SETTINGS,
    "engine.cost_model": "h100-llama-3.1-8b",
    "pools.prefill.workers": 1,
    "pools.decode.workers": 1,
}


@pytest_asyncio.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Target, AsyncClient]]:
    flags = {key.replace(".", "__"): value for key, value in FLAGS.items()}
    async with own_service(tmp_path_factory.mktemp("imitated"), **flags) as found:
        yield found


@pytest.fixture
def client(service: tuple[Target, AsyncClient]) -> AsyncClient:
    return service[1]


async def test_simulator_and_service_serve_the_same_and_find_the_same(client: AsyncClient) -> None:
    """And a prompt that comes in pieces is sent whole."""
    config = loading.load(flags=FLAGS).config
    measurement = await imitated.measure(
        client, config, workloads=("long_answers",), loads=("low",), seconds=1.0, repetitions=1
    )
    (run,) = measurement.runs
    for request, timed in zip(run.requests, run.timed, strict=True):
        assert (timed.prompt_tokens, len(timed.token_s)) == (request.prompt_tokens, request.output_tokens)
    assert all(each.ttft_s > each.prefill_s > 0 for each in measurement.points)

    # vLLM's schedulers take long to load: `test_validation` has them.
    found = imitated.judged(config, measurement, "light")
    assert {(each["workload"], each["load"]) for each in found["figures"]} == {("long_answers", "low")}
    assert found["of"] == len({each["figure"] for each in found["figures"]}) == 8
    (hits,) = (each for each in found["figures"] if each["figure"] == "hit_ratio")
    assert hits["measured"] == hits["simulated"] > 0

    cluster = Cluster(client, 100, 0, lambda: None)
    pieces = tuple((place * 0.02, cluster.fresh(tokens)) for place, tokens in enumerate((40, 300, 20)))
    whole = tuple(token for _, piece in pieces for token in piece)
    first, again = [
        (await cluster.run([prompt]))[0] for prompt in (Prompt(0.0, whole, 4, pieces), Prompt(0.0, whole, 4))
    ]
    assert first.opened_s is not None
    assert first.opened_s + 0.04 <= first.sent_s < first.token_s[0]
    assert (first.cached_tokens, again.cached_tokens) == (0, 352), "the prompt that came in pieces is the whole one"


async def test_cells_of_the_grid_get_the_simulators_requests_and_count_who_keeps_both_objectives(
    client: AsyncClient,
) -> None:
    """What a service takes is no matter here: one cell that all keep, and one that nobody can."""
    study = replace(STUDY, seconds=3.0, ttft_s=(1e-6, 600.0), tpot_ms=(1e5,))
    vocabulary = (await client.workers())[0].registration.model.vocabulary_size
    load = Load.of(study, 1.0)
    runs = await judged(client, vocabulary, Service("pools_50", tuple(study.cells), {}), study, load)
    assert [(run["measured"], run["simulated"], run["refused"], run["failed"]) for run in runs] == [
        (0.0, 0.0, 0, 0), (1.0, 1.0, 0, 0)
    ]  # fmt: skip
    assert {run["requests"] for run in runs} == {sum(each.arrival_s >= 0.75 for each in load.requests)}
    too_long = Prompt(0.0, tuple([1] * 40_000), 4)
    refused = await answered(client, too_long)
    assert (refused.refused, refused.token_s) == (False, []) and "40000" in refused.failed.replace(",", "")


async def test_the_doctor_finds_that_imitated_workers_answer_and_hand_off(service: tuple[Target, AsyncClient]) -> None:
    """They refuse log-probabilities, and their tokens are compared with nobody's."""
    report = examine(CHECKS, await look(service[0].address))
    assert [finding for finding in report.findings if finding.severity is Severity.CRITICAL] == []
    assert {each.check for each in report.not_checked} & {"answers", "handoff", "token_identity"} == {"token_identity"}
