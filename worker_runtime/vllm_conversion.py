"""Between the engine protocol and vLLM's own types: sampling parameters in, outputs and log-probabilities out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from cluster_core.clock import monotonic_s
from cluster_core.engine_jobs import (
    TENANT_ARG,
    EngineJob,
    FinishReason,
    PositionLogprobs,
    SamplingSpec,
    StructuredOutputs,
    TokenLogprob,
)
from cluster_core.errors import InvalidInputError
from kv_transfer.handoff.emitted_output import EMITTED_ARG
from kv_transfer.handoff.lease_params import REMOTE_DECODE, decode_params
from kv_transfer.handoff.rules import DEADLINE_PARAM

if TYPE_CHECKING:
    from vllm.logprobs import Logprob

# Key in `SamplingParams.extra_args`: until when anybody waits for the request, monotonic.
REQUEST_DEADLINE_ARG = "rachis_deadline_s"
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def prompt_of(job: EngineJob) -> dict[str, Any]:
    """A job's prompt as vLLM takes it."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(job.token_ids)}
    return prompt | ({"cache_salt": job.cache_salt} if job.cache_salt else {})


def trace_headers(job: EngineJob) -> dict[str, str] | None:
    """The span that vLLM's own is put below, where it exports any."""
    return {"traceparent": job.traceparent} if job.traceparent else None


def check_emitted(job: EngineJob, max_model_len: int, vocabulary: int) -> None:
    """Raises InvalidInputError where the answer has ended with what has been emitted of it, by its length, or cannot be
    the model's."""
    emitted = job.emitted.token_ids if job.emitted is not None else ()
    most = min(job.sampling.max_tokens, max_model_len - len(job.token_ids))
    if len(emitted) >= most:
        raise InvalidInputError(f"has {len(emitted)} tokens, the answer ends after {most}", field="emitted")
    if max(emitted, default=0) >= vocabulary:
        raise InvalidInputError(f"has token {max(emitted)}, the vocabulary has {vocabulary}", field="emitted")


def check_imitable(spec: SamplingSpec) -> None:
    """Raises InvalidInputError for what only something that computes can answer."""
    asked = (
        ("logprobs", spec.logprobs is not None),
        ("prompt_logprobs", spec.prompt_logprobs is not None),
        ("structured_outputs", spec.structured_outputs is not None),
    )
    for name, is_asked in asked:
        if is_asked:
            raise InvalidInputError("is not for an imitated GPU, which computes nothing", field=f"sampling.{name}")


def sampling_params(job: EngineJob, pull_until_s: float | None = None) -> SamplingParams:
    """vLLM's parameters for a job, hand-off included. pull_until_s: monotonic, of a job that pulls."""
    spec = job.sampling
    extra: dict[str, Any] = {}
    if job.hand_off:
        extra["kv_transfer_params"] = dict(REMOTE_DECODE)
    elif job.pull is not None:
        params = decode_params(job.pull.connector_params)
        extra["kv_transfer_params"] = {**params, DEADLINE_PARAM: pull_until_s}
    if job.emitted is not None:
        extra[EMITTED_ARG] = list(job.emitted.token_ids)
    if job.deadline_s is not None:
        extra[REQUEST_DEADLINE_ARG] = monotonic_s() + job.deadline_s
    if job.tenant.tenant_id:
        extra[TENANT_ARG] = job.tenant
    return SamplingParams(
        max_tokens=spec.max_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=spec.seed,
        stop=list(spec.stop),
        stop_token_ids=list(spec.stop_token_ids),
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=spec.repetition_penalty,
        logprobs=spec.logprobs,
        # Whoever emitted the first token has told them.
        prompt_logprobs=spec.prompt_logprobs if job.emitted is None else None,
        min_tokens=spec.min_tokens,
        ignore_eos=spec.ignore_eos,
        logit_bias=dict(spec.logit_bias) or None,
        allowed_token_ids=list(spec.allowed_token_ids) or None,
        bad_words=list(spec.bad_words),
        structured_outputs=(
            structured_outputs_params(spec.structured_outputs) if spec.structured_outputs is not None else None
        ),
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra or None,
    )


def structured_outputs_params(wanted: StructuredOutputs) -> StructuredOutputsParams:
    """Raises VLLMValidationError where it is not exactly one kind."""
    return StructuredOutputsParams(
        json=wanted.json,
        json_object=wanted.json_object,
        regex=wanted.regex,
        choice=list(wanted.choice) or None,
        grammar=wanted.grammar,
        structural_tag=wanted.structural_tag,
    )


def finish_reason(name: str | None) -> FinishReason | None:
    """vLLM's reason as ours; KeyError for one that is no proper end, such as `error` or `abort`."""
    return None if name is None else _FINISH_REASONS[name]


def prompt_logprobs(
    rows: "Sequence[dict[int, Logprob] | None] | None", token_ids: Sequence[int], top: int | None
) -> tuple[PositionLogprobs, ...]:
    """Of a prompt's tokens after the first, of which nobody can say anything."""
    if not rows:
        return ()
    found = zip(rows[1:], token_ids[1:], strict=True)
    return tuple(position_logprobs(row, token, top or 0) for row, token in found if row is not None)


def position_logprobs(row: "dict[int, Logprob]", sampled: int, top: int) -> PositionLogprobs:
    """One position: vLLM's table holds the sampled token and the likeliest ones together."""
    entries = [TokenLogprob(token, entry.logprob, entry.rank or 0) for token, entry in row.items()]
    likeliest = sorted((entry for entry in entries if 1 <= entry.rank <= top), key=lambda entry: entry.rank)
    return PositionLogprobs(next(entry for entry in entries if entry.token_id == sampled), tuple(likeliest[:top]))
