"""One request at a router, as vLLM's front sees its engine's outputs: tokens, log-probabilities, and why it ends.

The front detokenizes, and finds stop strings, by itself. So an answer that ended with a stop string comes without a
reason: the front finds the string in the tokens, and ends the answer as it would have.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing

import numpy as np
import torch
from rachis import AsyncClient, RachisError, token_prompt
from rachis.v1 import generation_pb2 as generation
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from cluster_configs.schema import MOST_SECONDS
from control_plane.gateway.refusals import as_vllm_error
from control_plane.gateway.sampling import wire_sampling

_LONGEST_NAME = 128
_REASONS = {
    generation.FINISH_REASON_STOP: FinishReason.STOP,
    generation.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


class Answer:
    """Runs from its creation. on_output: gets what is new. on_cached: how much of the prompt was cached, which the
    completion says, before the last output. on_failure: gets the one exception that ends it."""

    def __init__(
        self,
        client: AsyncClient,
        request: EngineCoreRequest,
        on_output: Callable[[EngineCoreOutput], None],
        on_cached: Callable[[int], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._client = client
        self._request = request
        self._on_output = on_output
        self._on_cached = on_cached
        self._on_failure = on_failure
        self._started = False
        # The last token is there: its call ends by itself, and counts as cancelled at the router otherwise.
        self._is_whole = False
        self._is_complete = False
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Nobody wants the rest."""
        if not self._is_whole:
            self._task.cancel()

    def on_end(self, call: Callable[[], object]) -> None:
        self._task.add_done_callback(lambda task: call())

    async def _run(self) -> None:
        try:
            async with aclosing(self._pieces()) as pieces:  # type: ignore[type-var]
                piece: generation.CompletionDelta | generation.Completion
                last: generation.CompletionDelta | None = None
                async for piece in pieces:
                    if isinstance(piece, generation.Completion):
                        self._end(last, piece)
                    elif piece.finish_reason:
                        self._is_whole, last = True, piece
                    elif piece.token_ids:
                        self._emit(piece)
            if not self._is_complete:
                raise EngineGenerateError("the router ended the answer early")
        except RachisError as error:
            self._on_failure(as_vllm_error(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who waits has to hear of it
            self._on_failure(error)

    def _pieces(self) -> AsyncIterator[generation.CompletionDelta | generation.Completion]:
        request = self._request
        assert request.sampling_params is not None and request.prompt_token_ids is not None
        return self._client.stream(
            token_prompt(request.prompt_token_ids),
            # How long it may take the router says.
            timeout_s=MOST_SECONDS,
            request_id=request.request_id[-_LONGEST_NAME:],
            cache_salt=request.cache_salt or "",
            priority=request.priority,
            # An adapter's name; what the model itself is called here, nobody else has to know.
            model=request.lora_request.lora_name if request.lora_request is not None else "",
            **wire_sampling(request.sampling_params),
        )

    def _end(self, last: generation.CompletionDelta | None, completion: generation.Completion) -> None:
        self._is_complete = True
        self._on_cached(completion.usage.cached_tokens)
        reason, stop_reason = self._reason(last, completion.finish_reason)
        self._emit(last, reason, stop_reason, completion.usage.cached_tokens)
        if reason is None:
            # The front has found the stop string by now, and heeds this no more.
            self._emit(None, FinishReason.STOP)

    def _reason(
        self, last: generation.CompletionDelta | None, reason: generation.FinishReason.ValueType
    ) -> tuple[FinishReason | None, int | None]:
        """Why the answer ends, and by which token, as vLLM's `check_stop` says it; None: by a stop string."""
        params = self._request.sampling_params
        token = last.token_ids[-1] if last is not None and last.token_ids else None
        if reason != generation.FINISH_REASON_STOP or params is None or token is None:
            return _REASONS[reason], None
        if token == params.eos_token_id and not params.ignore_eos:
            return FinishReason.STOP, None
        if token in (params.stop_token_ids or ()):
            return FinishReason.STOP, token
        return (None if params.stop else FinishReason.STOP), None

    def _emit(
        self,
        piece: generation.CompletionDelta | None,
        reason: FinishReason | None = None,
        stop_reason: int | None = None,
        cached_tokens: int = 0,
    ) -> None:
        stats = None
        if not self._started:
            self._started = True
            stats = PrefillStats()
            stats.set(len(self._request.prompt_token_ids or ()), cached_tokens, 0)
        self._on_output(
            EngineCoreOutput(
                self._request.request_id,
                list(piece.token_ids) if piece is not None else [],
                new_logprobs=_logprobs(piece.logprobs) if piece is not None else None,
                new_prompt_logprobs_tensors=_tensors(piece.prompt_logprobs) if piece is not None else None,
                finish_reason=reason,
                stop_reason=stop_reason,
                prefill_stats=stats,
            )
        )


def _logprobs(rows: Iterable[generation.PositionLogprobs]) -> LogprobsLists | None:
    """As vLLM's sampler gives them: the sampled token first, then the likeliest ones."""
    entries = [[row.sampled, *row.top] for row in rows]
    if not entries:
        return None
    return LogprobsLists(
        np.array([[entry.token_id for entry in row] for row in entries]),
        np.array([[entry.logprob for entry in row] for row in entries]),
        np.array([row[0].rank for row in entries]),
    )


def _tensors(rows: Iterable[generation.PositionLogprobs]) -> LogprobsTensors | None:
    """The same, of a prompt."""
    found = _logprobs(rows)
    if found is None:
        return None
    return LogprobsTensors(
        torch.from_numpy(found.logprob_token_ids),
        torch.from_numpy(found.logprobs),
        torch.from_numpy(found.sampled_token_ranks),
    )
