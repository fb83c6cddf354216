"""A model whose layers keep their KV in two ways, handed off between two real engines: what `make families` asks of
every family, of one of them in short."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rachis.v1 import generation_pb2 as generation

from cluster_configs.schema import EngineSection, HandoffSection, ModelSection
from tests import ROOT
from tests.families.tiny_models import FAMILIES, VOCABULARY, write_model
from tests.integration.conftest import until
from tests.integration.worker_processes import WorkerProcess, worker_pair

pytestmark = pytest.mark.integration

RESULT = json.loads((ROOT / "benchmarks" / "results" / "model-families.json").read_text())
FAMILY = "gemma3"
# More than the model's window, which gives blocks back while a prompt is computed.
LENGTHS = (33, 129, 500)


@pytest_asyncio.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    folder = tmp_path_factory.mktemp("family")
    write_model(FAMILIES[FAMILY], folder / "model")
    engine = EngineSection(kv_blocks=200, max_model_len=1024)
    handoff = HandoffSection(deadline_s=60, lease_s=120)
    model = ModelSection(path=str(folder / "model"), name=FAMILY)
    async with worker_pair(folder, handoff, prefill_engine=engine, decode_engine=engine, model=model) as workers:
        yield workers


def prompt(tokens: int) -> list[int]:
    return [(7 * index + index * index + tokens) % (VOCABULARY - 2) for index in range(tokens)]


@pytest.mark.parametrize("tokens", LENGTHS)
async def test_an_answer_from_blocks_that_were_pulled_is_that_of_one_engine(
    pair: tuple[WorkerProcess, WorkerProcess], tokens: int
) -> None:
    prefill, decode = pair
    answer = await decode.decode(prompt(tokens), await prefill.prefill(prompt(tokens)))
    assert answer.started.handoff == generation.HANDOFF_OUTCOME_PULLED
    assert answer.token_ids == (await prefill_alone(prefill, prompt(tokens), len(answer.token_ids)))
    assert len(set(answer.token_ids)) > 1
    await until(prefill.nothing_held, "the lease is over")


async def prefill_alone(worker: WorkerProcess, token_ids: list[int], count: int) -> list[int]:
    """One token after the other, each from a prompt of all before it."""
    answer: list[int] = []
    for _ in range(count):
        answer += (await worker.prefill(token_ids + answer, hand_off=False)).first.token_ids
    return answer


async def test_workers_report_what_the_table_of_families_says(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    features = RESULT["families"][FAMILY]["features"]
    for worker in pair:
        reported = (await worker.status()).registration.model.missing_features
        assert {name: reason for name, reason in features.items() if reason != "yes"}.items() <= reported.items()
        assert not [name for name in reported if features.get(name) == "yes"]
