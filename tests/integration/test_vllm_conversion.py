"""What vLLM is told of a job, and what is made of its answers; `integration` because importing vLLM takes seconds."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_core.clock import UnixMs, monotonic_s
from cluster_core.engine_jobs import EmittedTokens, EngineJob, FinishReason, KvLease, SamplingSpec, TokenLogprob
from cluster_core.errors import InvalidInputError

pytestmark = pytest.mark.integration

DEADLINE_S = 15.0
SPEC = SamplingSpec(
    max_tokens=7,
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.125,
    seed=11,
    stop=("a", "bc"),
    stop_token_ids=(3, 4),
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    logprobs=2,
    prompt_logprobs=1,
    min_tokens=2,
    ignore_eos=True,
    logit_bias={5: -1.5},
    allowed_token_ids=(5, 6),
)


def params_of(pull_until_s: float | None = None, **job: Any) -> Any:
    from worker_runtime.vllm_conversion import sampling_params

    return sampling_params(EngineJob("r", (1, 2), job.pop("sampling", SPEC), **job), pull_until_s)


def lease(params: bytes = b'{"remote_port":7}') -> KvLease:
    return KvLease("r#1", params, UnixMs(0))


def test_every_field_of_the_sampling_spec_reaches_vllm_under_its_name() -> None:
    params = params_of()

    for name, value in asdict(SPEC).items():
        assert getattr(params, name) == (list(value) if isinstance(value, tuple) else value), name


def test_a_plain_job_tells_vllm_nothing_of_hand_offs() -> None:
    assert params_of().extra_args is None


def test_a_hand_off_job_asks_vllm_to_keep_the_blocks_for_another_engine() -> None:
    params = params_of(hand_off=True).extra_args["kv_transfer_params"]

    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)


def test_hand_off_jobs_do_not_share_their_parameters() -> None:
    params_of(hand_off=True).extra_args["kv_transfer_params"]["do_remote_decode"] = False

    assert params_of(hand_off=True).extra_args["kv_transfer_params"]["do_remote_decode"] is True


def test_a_pull_carries_the_connectors_parameters_and_its_deadline() -> None:
    assert params_of(7.5, pull=lease()).extra_args["kv_transfer_params"] == {
        "remote_port": 7,
        "rachis_pull_deadline_s": 7.5,
    }


def test_a_pull_with_damaged_parameters_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="connector_params"):
        params_of(pull=lease(b"{"))


def test_what_has_been_emitted_is_told_to_every_worker_of_the_engine() -> None:
    assert params_of(emitted=EmittedTokens((0, 5), 1)).extra_args == {"rachis_emitted": [0, 5]}


def test_a_deadline_is_told_on_the_monotonic_clock() -> None:
    before = monotonic_s()

    deadline_s = params_of(deadline_s=2.5).extra_args["rachis_deadline_s"]

    assert before + 2.5 <= deadline_s <= monotonic_s() + 2.5


def test_reasons_that_are_no_proper_end_are_not_taken_for_one() -> None:
    from worker_runtime.vllm_conversion import finish_reason

    assert [finish_reason(name) for name in (None, "stop", "length")] == [None, FinishReason.STOP, FinishReason.LENGTH]
    for name in ("abort", "error"):
        with pytest.raises(KeyError):
            finish_reason(name)


def test_logprobs_list_the_likeliest_in_order_and_the_sampled_one_apart() -> None:
    from worker_runtime.vllm_conversion import position_logprobs

    row: Any = {
        9: SimpleNamespace(logprob=-4.0, rank=5),
        2: SimpleNamespace(logprob=-1.0, rank=2),
        1: SimpleNamespace(logprob=-0.5, rank=1),
    }

    position = position_logprobs(row, 9, 2)

    assert position.sampled == TokenLogprob(9, -4.0, 5)
    assert position.top == (TokenLogprob(1, -0.5, 1), TokenLogprob(2, -1.0, 2))
    assert position_logprobs(row, 1, 0).top == ()
