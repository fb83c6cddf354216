"""Cells of the grid on a service: which services there are, and who keeps what."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.system_grid import HYBRID, requests_of
from benchmarks.system_grid_service import CELLS, STUDY, Answer, Load, services
from cluster_configs import loading
from cluster_core.errors import ConfigError
from command_line.main import app


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


def test_a_rate_finds_nothing_in_caches_of_what_another_one_has_asked() -> None:
    loads = [Load.of(STUDY, rate) for rate in STUDY.rates]
    blocks = [{prompt.token_ids[:32] for prompt in load.prompts(32_000, 0)} for load in loads]
    assert blocks[0] and not blocks[0] & blocks[1]


@pytest.mark.parametrize("rate", [1e-6, 0.01])
def test_a_rate_at_which_nobody_is_measured_is_refused_before_anything_starts(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"--rates: .* nobody is measured"):
        Load.of(replace(STUDY, seconds=10.0), rate)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--imitated"], "--imitated: is of a grid"),
        (["--grid", "--imitated", "--quick"], "--quick: is nothing to imitated cells"),
        (["--grid", "--imitated", "--seeds", "1"], "--seeds: is nothing"),
        (["--grid", "--imitated", "--grid-ttft-s", "9"], "--grid-ttft-s: is nothing"),
    ],
)
def test_options_that_would_be_left_out_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(app, ["bench", "system", *given], catch_exceptions=False)
