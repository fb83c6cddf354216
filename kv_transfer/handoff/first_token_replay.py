"""The decode worker's first sampling step is fixed to the token that the prefill worker sampled.

A decode engine that gets the prompt's KV samples once before it generates on: with this logits processor that
sample is the token the client has already seen. Everything the sampler keeps per request is then as if the engine
had sampled it itself: penalties count it as output, a seeded generator has made the same number of draws, minimum
and maximum lengths count it. Without it the token would have to be smuggled in as prompt, and the output of those
options would differ from one plain engine's.

vLLM V1 logits processor interface (`vllm.v1.sample.logits_processor`).
"""

from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from kv_transfer.handoff.rules import FIRST_TOKEN_ARG

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class FirstTokenReplay(LogitsProcessor):
    """Masks all logits but one, for rows whose request carries a first token and has no output yet."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        # Batch row -> (token, the request's running list of output tokens).
        self._rows: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row_state)
        for row in [row for row, (_, output) in self._rows.items() if output]:
            del self._rows[row]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (token, _) in self._rows.items():
            logits[row].fill_(float("-inf"))
            logits[row, token] = 0.0
        return logits

    @staticmethod
    def _row_state(
        params: "SamplingParams", prompt: list[int] | None, output: list[int]
    ) -> tuple[int, list[int]] | None:
        token = (params.extra_args or {}).get(FIRST_TOKEN_ARG)
        return None if token is None or output else (int(token), output)
