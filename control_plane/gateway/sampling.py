"""vLLM's sampling parameters as the wire says them. What it cannot say is refused by name, never dropped."""

import json
from collections.abc import Mapping
from typing import Any

from rachis.v1 import generation_pb2 as generation
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

# What may be asked for and has no field of `rachis.v1.SamplingParams`: the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "prompt_logprob_token_ids": (None,),
    "logprob_token_ids": (None, []),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "trace_decode_token_ids": (None, []),
    # Hand-offs and emitted tokens travel there inside the cluster: nobody sets them from outside.
    "extra_args": (None, {}),
    "watermarking": (None, False),
}
# By vLLM's names; the others are called the same on the wire.
_SAME = (
    "max_tokens",
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
_STRUCTURED = tuple(field.name for field in generation.StructuredOutputs.DESCRIPTOR.fields)
# Of other compilers than the one that the engines have: what asks for nothing.
_NOT_STRUCTURED: Mapping[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None,),
}


def wire_sampling(params: SamplingParams) -> dict[str, Any]:
    """Fields of `rachis.v1.SamplingParams`. Raises VLLMValidationError."""
    _refuse(params, UNSUPPORTED)
    tops = {"logprobs": params.num_logprobs, "prompt_logprobs": params.prompt_logprobs}
    for name, top in tops.items():
        if top is not None and top < 0:
            raise VLLMValidationError(f"{name} of the whole vocabulary are not supported", parameter=name)
    fields = {name: getattr(params, name) for name in _SAME} | tops
    # vLLM's -1 is the wire's 0: all of them.
    fields["top_k"] = max(0, params.top_k)
    if not params.skip_special_tokens:
        # An engine looks for them in text without special tokens. The front finds them, and ends the request then.
        fields["stop"] = None
    if params.seed is not None:
        # What torch makes of a negative one.
        fields["seed"] = params.seed % (1 << 64)
    if params.structured_outputs is not None:
        fields["structured_outputs"] = _structured(params.structured_outputs)
    return {name: value for name, value in fields.items() if value is not None}


def _structured(wanted: StructuredOutputsParams) -> generation.StructuredOutputs:
    """What vLLM has turned into another kind meanwhile goes as that."""
    _refuse(wanted, _NOT_STRUCTURED, "structured_outputs.")
    if wanted.choice is not None and not wanted.choice:
        # On the wire that would be none.
        raise VLLMValidationError(f"Choice '{wanted.choice}' cannot be an empty list")
    found = {name: getattr(wanted, name) for name in _STRUCTURED}
    if isinstance(found["json"], dict):
        found["json"] = json.dumps(found["json"])
    return generation.StructuredOutputs(**{name: value for name, value in found.items() if value is not None})


def _refuse(asked: object, unsupported: Mapping[str, tuple[Any, ...]], within: str = "") -> None:
    for name, nothing in unsupported.items():
        value = getattr(asked, name, None)
        if not any(value is each or (isinstance(value, type(each)) and value == each) for each in nothing):
            raise VLLMValidationError(f"{within}{name} is not supported by this service", parameter=f"{within}{name}")
