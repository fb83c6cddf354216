"""The part of the streaming scheduler that takes in what a session receives, between two engine steps.

Input lengthens or replaces the prompt; the KV of the longest common prefix is kept, the rest is freed, on the device
and in host memory; then the session is queued again. It enters the model runner as a new request under its own name,
which both of vLLM's runners allow. Blocks that are published in the prefix cache are never written again: a common
prefix that ends inside one is rounded down (Stream2LLM section 4.2; docs/decisions/0013).

While a connector writes blocks for a session its input waits until they have landed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.request import Request, RequestStatus

from cluster_core.clock import monotonic_s
from cluster_core.engine_jobs import SessionMode, SessionRecord
from cluster_core.token_prefix import longest_common_prefix
from kv_transfer import vllm_private
from prefill_worker.partial_budget import WholePrompts
from prefill_worker.session_ledger import SessionLedger
from prefill_worker.streaming_request import LOADING, NEVER, PARKED
from prefill_worker.survival import SurvivalEstimates

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object


class _Input(NamedTuple):
    """What the prompt is from now on."""

    prompt: list[int]
    # It is another prompt, not a longer one.
    replaces: bool = False
    # It is complete.
    closes: bool = False


class SessionInput(_Scheduler):
    """Mixin. Its calls come from the thread that steps the engine."""

    _sessions: dict[str, SessionLedger]
    _ended: dict[str, SessionLedger]
    _lost_idle: set[str]
    _late_input: dict[str, list[_Input]]
    _survival: SurvivalEstimates
    _whole_prompts: WholePrompts
    swaps: Any

    def open_session(self, request: Request, mode: SessionMode) -> None:
        """Takes in a session's request, with the prompt as far as it is known."""
        now_s = monotonic_s()
        ledger = self._sessions[request.request_id] = SessionLedger(mode, now_s)
        ledger.opened(len(vllm_private.token_ids(request)))
        if mode is SessionMode.UPDATE:
            self._survival.opened(request.request_id, request.cache_salt or "", ledger.tokens.prompt_tokens)
        self.add_request(request)

    def extend_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        late = self._late_input.get(request_id)
        if late is None:
            self._take_in(request_id, _Input([*self._latest_prompt(request_id), *token_ids]), len(token_ids))
            return
        # What waits is lengthened: a whole prompt for each append would be many.
        late[-1].prompt.extend(token_ids)
        self._note_input(request_id, late[-1], len(token_ids))

    def replace_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The prompt is this from now on; the KV of the longest common prefix is kept."""
        self._take_in(request_id, _Input(list(token_ids), replaces=True), len(token_ids))

    def close_input(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Completes the prompt, which must not be empty, and returns it. The request runs on as any other; where blocks
        are being written for it, it has its prompt once they have landed."""
        prompt = [*self._latest_prompt(request_id), *token_ids]
        self._take_in(request_id, _Input(prompt, closes=True), len(token_ids))
        return list(prompt)

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    def session_ledger(self, request_id: str) -> SessionLedger | None:
        return self._sessions.get(request_id)

    def session_cached_tokens(self, request_id: str) -> int:
        """Of a session that has not ended, or whose record was not taken yet."""
        ledger = self._sessions.get(request_id) or self._ended[request_id]
        return ledger.cached_tokens

    def take_session_record(self, request_id: str) -> SessionRecord | None:
        """What happened to a session that has ended; there once."""
        ledger = self._ended.pop(request_id, None)
        return ledger.record() if ledger is not None else None

    def _latest_prompt(self, request_id: str) -> list[int]:
        late = self._late_input.get(request_id)
        prompt: list[int] = late[-1].prompt if late else vllm_private.token_ids(self.requests[request_id])
        return prompt

    def _note_input(self, request_id: str, given: _Input, new_tokens: int) -> None:
        ledger = self._sessions[request_id]
        self.requests[request_id].last_chunk_s = monotonic_s()
        if given.closes:
            ledger.closed(new_tokens, len(given.prompt))
        else:
            ledger.received(new_tokens, len(given.prompt))

    def _take_in(self, request_id: str, given: _Input, new_tokens: int) -> None:
        request = self.requests[request_id]
        self._note_input(request_id, given, new_tokens)
        if request.status is LOADING or request_id in self._late_input:
            # Blocks are being written for it: the input waits until they have landed, behind what came before.
            self._late_input.setdefault(request_id, []).append(given)
        else:
            self._apply(request, given)

    def _apply(self, request: Any, given: _Input) -> None:
        now_s, prompt = monotonic_s(), given.prompt
        ledger = self._sessions[request.request_id]
        self._take_out(request)
        known = vllm_private.token_ids(request)
        # A longer prompt begins with the one of before.
        common = longest_common_prefix(known, prompt) if given.replaces else len(known)
        self._invalidate(request, min(common, len(prompt) - 1), ledger, now_s)
        if given.replaces:
            ledger.kept(self._ready_tokens(request))
        if given.closes:
            self._whole_prompts.came(now_s)
            self._survival.closed(request.request_id)
        else:
            self._survival.updated(request.request_id, common, len(prompt))
        # A list of its own: the model runner may hold the one before.
        request.prompt_token_ids = prompt
        known[common:] = prompt[common:]
        request.num_prompt_tokens = len(prompt)
        request.held_tokens = 0 if given.closes else min(1, len(prompt))
        request.input_open = not given.closes
        self._set_lost(request, False)
        request.forget_hashes(min(common, request.num_tokens), self.hash_block_size)
        # The model runner forgets the request, and hears of it again as a new one.
        self.reset_preempted_req_ids.add(request.request_id)
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        # So that vLLM does not resume it with the prompt of before once blocks were loaded for it.
        request.num_preemptions = 0
        request.is_prefill_chunk = False
        self._put_back(request, ledger, now_s)

    def _invalidate(self, request: Any, keep_tokens: int, ledger: SessionLedger, now_s: float) -> None:
        """Frees the KV of all but the first `keep_tokens` tokens, wherever it is."""
        keep_tokens = max(0, keep_tokens)
        lost = 0
        if request.num_computed_tokens > keep_tokens:
            kept = vllm_private.truncate_blocks(self, request, keep_tokens)
            lost = request.num_computed_tokens - kept
            request.num_computed_tokens = kept
            vllm_private.drop_reservation(self, request)
        if self.swaps is not None:
            lost += self.swaps.shorten(request.request_id, keep_tokens)
        ledger.shortened(keep_tokens)
        ledger.invalidated(lost, now_s)

    def _set_lost(self, request: Any, lost: bool) -> None:
        request.lost_idle = lost
        (self._lost_idle.add if lost else self._lost_idle.discard)(request.request_id)

    def _revive_lost(self) -> None:
        """Queues sessions that lost their blocks while they were idle, as far as free blocks hold all that they had."""
        free = vllm_private.pool_of(self).get_num_free_blocks()
        for request_id in sorted(self._lost_idle):
            request = self.requests[request_id]
            needed = -(-request.num_tokens // self.block_size)
            if request.status is PARKED and needed <= free:
                free -= needed
                self.num_waiting_for_streaming_input -= 1
                self.deferred_waiting.discard(request)
                request.status = RequestStatus.WAITING

    def _take_in_late_input(self) -> None:
        """Of those whose blocks have landed, whoever has taken note of it first."""
        for request_id in list(self._late_input):
            request = self.requests[request_id]
            if not vllm_private.is_ready(self, request):
                continue
            for given in self._late_input.pop(request_id):
                self._apply(request, given)

    def _hold_back(self, request: Any) -> None:
        request.held_tokens = min(1, len(vllm_private.token_ids(request)))
        request.forget_hashes(request.num_tokens, self.hash_block_size)

    def _set_parked(self, request: Any) -> None:
        request.status = PARKED
        request.waiting_since_s = NEVER
        if not self._is_behind(request):
            self._set_lost(request, False)
        self.num_waiting_for_streaming_input += 1

    def _take_out(self, request: Any) -> None:
        """Out of whatever queue it is in."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            return
        if request.status is PARKED:
            self.num_waiting_for_streaming_input -= 1
        for queue in (self.waiting, self.kv_holding_waiting):
            queue.remove_requests([request])
        self.deferred_waiting.discard(request)

    def _put_back(self, request: Any, ledger: SessionLedger, now_s: float) -> None:
        """Queues a session that was taken out, as one that has tokens to compute or as a parked one."""
        if self._ready_tokens(request) < request.num_tokens:
            request.status = RequestStatus.WAITING
            if request.waiting_since_s == NEVER:
                request.waiting_since_s = now_s
            ledger.wait(now_s)
        else:
            self._set_parked(request)
        vllm_private.enqueue(self, request)
        ledger.ready(self._ready_tokens(request))

    def _ready_tokens(self, request: Any) -> int:
        """Prompt tokens whose KV exists for this request, on the device or in host memory."""
        swapped = self.swaps.tokens(request.request_id) if self.swaps is not None else 0
        return max(request.num_computed_tokens, swapped)

    def _computed(self, request_id: str) -> int:
        return int(self.requests[request_id].num_computed_tokens)

    def _settle(self, request_id: str, now_s: float) -> None:
        """After a step that computed tokens of a session."""
        ledger, request = self._sessions[request_id], self.requests.get(request_id)
        if request is None or request.is_finished():
            ledger.finish(now_s)
            self._ended[request_id] = self._sessions.pop(request_id)
            return
        if request.num_output_tokens:
            ledger.finish(now_s)
            return
        ledger.ready(min(self._ready_tokens(request), ledger.tokens.prompt_tokens))
        if request.status is RequestStatus.RUNNING and request.input_open and not self._is_behind(request):
            self._leave_model_runner(request)
            ledger.caught_up(now_s)

    def _is_behind(self, request: Any) -> bool:
        """Whether there are tokens whose KV is nowhere, and that no step computes yet."""
        return bool(self._ready_tokens(request) < request.num_tokens)

    def _leave_model_runner(self, request: Any) -> None:
        """Frees the place of a running request, which keeps its blocks: it is parked, or waits when it is behind."""
        self.running.remove(request)
        self.reset_preempted_req_ids.add(request.request_id)
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        if self._is_behind(request):
            request.status = RequestStatus.WAITING
        else:
            vllm_private.drop_reservation(self, request)
            self._set_parked(request)
        vllm_private.enqueue(self, request)
