"""vLLM's request, of which the scheduler sees fewer tokens than are known."""

from typing import Any

from vllm.v1.request import RequestStatus

from kv_transfer import vllm_private
from kv_transfer.limited_request import LimitedRequest

# What vLLM calls a streaming session that waits for its next input.
PARKED = RequestStatus.WAITING_FOR_STREAMING_REQ
# What vLLM calls a request whose blocks are being written by a connector.
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
NEVER = float("inf")


class StreamingRequest(LimitedRequest):
    """See the module."""

    # At the end of the prompt, not computed before the input is closed.
    held_tokens = 0
    # Most tokens of it that may be computed when the step that is being scheduled has run.
    step_limit: int | None = None
    input_open = False
    # A session that lost its blocks while it waited for input; what it had is computed again where there is room for
    # it, at nobody's expense, or when input comes.
    lost_idle = False
    arrived_s = 0.0
    last_chunk_s = 0.0
    waiting_since_s = NEVER
    # Blocks at the end of the prompt have no hashes yet. They get them when somebody asks: of a prompt that is replaced
    # before a step would compute it nobody does.
    hashes_are_due = False

    # vLLM has it as an attribute, which lies where it was.
    @property
    def block_hashes(self) -> list[Any]:
        if self.step_limit is None:
            self.make_hashes()
        hashes: list[Any] = self.__dict__["block_hashes"]
        return hashes

    @block_hashes.setter
    def block_hashes(self, hashes: list[Any]) -> None:
        self.__dict__["block_hashes"] = hashes

    def make_hashes(self) -> None:
        """Before a step is limited: while it is, no blocks get hashes, and vLLM publishes those that it fills."""
        if self.hashes_are_due:
            self.hashes_are_due = False
            self.update_block_hashes()

    def forget_hashes(self, first_token: int, block_size: int) -> None:
        """Of the blocks that hold it and those behind it, which are another prompt's from now on."""
        del self.__dict__["block_hashes"][first_token // block_size :]
        self.hashes_are_due = True

    @property
    def num_tokens(self) -> int:
        visible = len(vllm_private.token_ids(self)) - self.held_tokens
        return visible if self.step_limit is None else min(visible, self.step_limit)
