"""Cells of the grid on a service: which services there are, and who keeps what."""

import pytest

from benchmarks.system_grid import HYBRID, requests_of
from benchmarks.system_grid_service import CELLS, STUDY, Answer, services
from cluster_configs import loading


@pytest.mark.parametrize(
    ("answer", "keeps"),
    [
        (Answer([1.0, 1.04, 1.09]), True),
        (Answer([1.01, 1.05, 1.1]), False),
        (Answer([0.2, 0.25, 0.31]), False),
        # Its mean counts, not its longest pause.
        (Answer([0.2, 0.21, 0.3]), True),
        (Answer([0.9]), True),
        (Answer(refused=True), False),
        (Answer(failed="gone"), False),
    ],
)
def test_who_keeps_both_objectives(answer: Answer, keeps: bool) -> None:
    assert answer.keeps(1.0, 50.0) == keeps


def test_each_set_up_is_a_service_that_can_be_and_the_hybrid_one_for_each_cell() -> None:
    found = services()
    assert [each.name for each in found] == ["pools_50", "shared", *[HYBRID] * len(CELLS)]
    for service in found:
        config = loading.load(flags=dict(service.settings)).config
        pools = config.pools
        assert pools.prefill.workers + pools.decode.workers + pools.shared.workers == 4
        if service.name == HYBRID:
            ((ttft_s, tpot_ms),) = service.cells
            assert (config.objectives.ttft_s, config.objectives.tpot_s) == (ttft_s, tpot_ms / 1000)
            assert config.placement.policy == "objectives"
        else:
            assert (service.cells, config.objectives.tpot_s) == (CELLS, 0)
    assert set(CELLS) <= set(STUDY.cells)


def test_requests_fit_the_model_and_their_blocks_are_the_services() -> None:
    config = loading.load(flags=dict(services()[0].settings)).config
    for rate in STUDY.rates:
        workload = requests_of(STUDY, 4, rate, 0)
        assert workload.block_tokens == config.engine.block_size_tokens
        assert all(each.prompt_tokens + each.output_tokens <= config.engine.max_model_len for each in workload)
