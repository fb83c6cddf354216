"""The part of the streaming scheduler in which tenants and priorities take turns (`prefill_worker.prompt_turns`).

It knows whose requests are here, says whether steps are planned for that, and makes them short. Steps are planned only
for models whose prompts can be gone on from, or cut off, as sessions need it: of others vLLM's order is kept.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cluster_core.clock import monotonic_s
from kv_transfer.kv_layout import layout_of
from kv_transfer.model_features import Feature, allows
from kv_transfer.request_tenant import tenant_of
from prefill_worker.prompt_turns import Mix, PromptTurns
from prefill_worker.step_speed import StepSpeed

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
    from vllm.v1.request import Request
else:
    _Scheduler = object


class TurnTaking(_Scheduler):
    """Mixin over `Scheduler` and `AsyncScheduler`."""

    running: list[Any]
    requests: dict[str, Any]
    max_num_scheduled_tokens: int
    _speed: StepSpeed
    _turns: PromptTurns
    _mix: Mix
    _can_plan: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._speed = StepSpeed()
        self._turns = PromptTurns()
        self._mix = Mix()
        self._can_plan = allows(layout_of(self.vllm_config, self.kv_cache_config), Feature.SESSIONS)

    def add_request(self, request: "Request") -> None:
        self._mix.came(request.request_id, request.priority, tenant_of(request))
        super().add_request(request)
        self._mix.look(monotonic_s())

    def _free_request(self, request: "Request", delay_free_blocks: bool = False) -> Any:
        self._mix.left(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    @property
    def _takes_turns(self) -> bool:
        """The same from one step to the next."""
        return self._mix.is_mixed and self._can_plan

    @contextmanager
    def _in_short_steps(self) -> Iterator[None]:
        """While the block runs a step is short where others may be waiting for its end; of a block at least."""
        budget = self.max_num_scheduled_tokens
        if self._takes_turns:
            prompts = max(self.block_size, self._speed.turn_step_tokens)
            self.max_num_scheduled_tokens = int(min(budget, prompts + self._one_token_each()))
        try:
            yield
        finally:
            self.max_num_scheduled_tokens = budget

    def _one_token_each(self) -> int:
        """How many have begun to answer, and need a token of the step."""
        return sum(bool(request.num_output_tokens) for request in self.running)

    def _note_unplanned(self, tokens: Mapping[str, int]) -> None:
        """A step of vLLM's own computed so many, by the name of a request."""
        if self._mix.alone is not None:
            of_prompts = sum(count for name, count in tokens.items() if count > 1 and not self._answers(name))
            self._turns.computed_alone(*self._mix.alone, of_prompts)

    def _answers(self, name: str) -> bool:
        return bool(self.requests[name].num_output_tokens)
