"""vLLM's request, of whose tokens a step may be told to compute a part only, though its budget had room for more.

vLLM reads `num_tokens_with_spec` for that alone, and of running requests alone: what else it asks of a request, above
all how many blocks it will need, stays true.
"""

from typing import Any

from vllm.v1.request import Request


class LimitedRequest(Request):
    """See the module."""

    # Most tokens of it that may be computed when the step that is being scheduled has run; None: as many as there are.
    step_end: int | None = None

    @property
    def num_tokens_with_spec(self) -> int:
        tokens = self.num_tokens + len(self.spec_token_ids)
        return tokens if self.step_end is None else min(tokens, self.step_end)


def last_step_runs(request: Any) -> bool:
    """As vLLM's own check: the step that samples the last token that was asked for has not come back yet."""
    placeholders = request.num_output_placeholders
    end = request.num_prompt_tokens + request.max_tokens
    return bool(placeholders and request.num_computed_tokens + 2 - placeholders >= end)


def limit(request: Any, tokens: int) -> None:
    """Until `lift` a step computes at most so many tokens of it."""
    if not isinstance(request, LimitedRequest):
        request.__class__ = LimitedRequest
    request.step_end = request.num_computed_tokens + tokens


def lift(request: Any) -> None:
    request.step_end = None
    if type(request) is LimitedRequest:
        request.__class__ = Request
