"""The part of the streaming scheduler that decides a step in two phases and has vLLM's own `schedule` carry it out.

Phase 1 orders everything unfinished by the policy and finds out who gets which tokens, changing nothing. Phase 2
preempts those that were left out, lowest priority first, until the planned ones have their blocks. Then vLLM schedules
with the planned requests alone in its queues; the others are put back behind it.
Source: Stream2LLM section 4.1; docs/decisions/0014.
"""

from collections.abc import Callable, Set
from typing import Any, Literal

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from cluster_configs.preemption_costs import CostModel
from cluster_core.clock import monotonic_s
from kv_transfer import vllm_private
from kv_transfer.between_steps import NAP_S
from kv_transfer.limited_request import last_step_runs
from kv_transfer.request_tenant import tenant_of
from prefill_worker.adapter_standstill import AdapterStandstill
from prefill_worker.leased_blocks import LeasedBlocks
from prefill_worker.partial_budget import HELD_NAP_S, PartialBudget, WholePrompts
from prefill_worker.planned_queues import PlannedQueues
from prefill_worker.planning import Grant, StepPlan, plan_step, reached_tokens, victims
from prefill_worker.policies import Contender, Policy, Tenure
from prefill_worker.preemption import Preemption, choose
from prefill_worker.session_input import SessionInput
from prefill_worker.streaming_request import LOADING, NEVER, PARKED
from prefill_worker.turn_taking import TurnTaking


class TwoPhase(SessionInput, TurnTaking, PlannedQueues, AdapterStandstill):
    """Mixin over `Scheduler` and `AsyncScheduler`."""

    # Those that vLLM ends with the step.
    grammar_compile_error_reqs: set[str]
    preemption_strategy: Literal["recompute", "swap", "cost"]
    cost_model: CostModel
    _order: Policy
    _leased: LeasedBlocks
    # Sessions that still take input are computed little at a time, and beside no whole prompt.
    _bounds_partial: bool
    _whole_prompts: WholePrompts
    # How long there is nothing to do but to look whether those who are held back still are, unless something comes.
    held_nap_s: float
    _starvation_s: float
    # Free blocks that sessions may still take back which lost theirs while they were idle.
    _idle_room_blocks: int
    # Of `TieredScheduling`.
    tokens_in_host_memory: Callable[[Any, int], int]
    is_loading: Callable[[str], bool]
    waits_for_others_load: Callable[[Any, int], bool]
    # Blocks of a waiting contender's prefix hit that others hold: they cost it nothing.
    _shared_hits: dict[str, int]
    # Those that were being loaded when the step before was planned. Who has landed since keeps its blocks for one plan:
    # it would lose them to whoever waited for them meanwhile, again and again.
    _loading: set[str]
    # Planned for the steps before, which computed nothing: vLLM had no room for what would be loaded for them.
    _refused: set[str]

    def _schedule_in_two_phases(self, schedule: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        """One step. `schedule`: vLLM's own."""
        now_s = monotonic_s()
        self._take_in_late_input()
        plan = self._plan(now_s)
        self._survival.planned()
        self._make_room(plan, now_s)
        before = {grant.contender.request_id: self._computed(grant.contender.request_id) for grant in plan.grants}
        with self._only(plan):
            output = schedule()
        self._note_scheduled(output, before, now_s)
        self._turns.computed((*(each.contender for each in plan.grants), *plan.left_out), output.num_scheduled_tokens)
        self._loading = {
            name for name, request in self.requests.items() if request.status is LOADING and self.is_loading(name)
        }
        self._refused = set() if output.num_scheduled_tokens else self._refused | before.keys()
        self.held_nap_s = self._held_nap_s(plan)
        for contender in plan.left_out:
            request = self.requests[contender.request_id]
            if contender.remaining_tokens and request.waiting_since_s == NEVER:
                request.waiting_since_s = now_s
        return output

    def _held_nap_s(self, plan: StepPlan) -> float:
        """Shorter where not only open sessions wait: nobody would hear that blocks have landed or are free."""
        if plan.grants or not any(each.remaining_tokens for each in plan.left_out):
            return 0.0
        are_open = len(self.requests) == sum(not each.complete for each in plan.left_out)
        return HELD_NAP_S if are_open and self.copying_since_s is None else NAP_S

    @property
    def _plans_steps(self) -> bool:
        """Else vLLM's own schedule does."""
        return bool(self._sessions) or self._takes_turns or self._runs_too_many_adapters()

    @property
    def refused_count(self) -> int:
        """Of those that were planned since a step has last computed anything."""
        return len(self._refused)

    # Phase 1.

    def _plan(self, now_s: float) -> StepPlan:
        self._shared_hits = {}
        present = self._present()
        self._leased.look(self._blocks_of_others({request.request_id for request, *_ in present}))
        self._idle_room_blocks = vllm_private.pool_of(self).get_num_free_blocks()
        by_policy = self._order([self._contender(*each, now_s) for each in present], now_s)
        ordered = self._turns.order(by_policy)
        if self._has_turns():
            # Who needs one token also keeps its blocks before prompts do.
            by_policy = sorted(by_policy, key=self._turn)
            ordered.sort(key=self._turn)
        budget = reach = self.max_num_scheduled_tokens
        known = set[str]()
        beside_whole = not self._bounds_partial
        while True:
            self._look_up_within(ordered, reach, known, beside_whole=beside_whole)
            plan = plan_step(
                ordered,
                budget,
                self._capacity_blocks(),
                self.max_num_active_reqs,
                self.block_size,
                overdue_since_s=now_s - self._starvation_s,
                most_adapters=self._most_adapters,
                partial=self._partial_budget(now_s) if self._bounds_partial else None,
                begun=self._turns.begun(by_policy),
            )
            if all(grant.contender.request_id in known for grant in plan.grants):
                return plan
            # Behind those that do not fit there are others. A hit takes free blocks, so vLLM would refuse them.
            reach *= 2
            beside_whole = True

    def _look_up_within(self, ordered: list[Contender], reach: int, known: set[str], *, beside_whole: bool) -> None:
        """Those that come first, as far as they have so many tokens to compute. known: by name, who has been.
        beside_whole: also who still takes input, behind a prompt that is whole; it would need hashes for that."""
        ahead, is_beside_whole = 0, False
        for contender in ordered:
            if ahead >= reach:
                break
            if is_beside_whole and not beside_whole and not contender.complete:
                continue
            is_beside_whole |= contender.complete and not contender.decodes and contender.remaining_tokens > 0
            if contender.request_id not in known:
                known.add(contender.request_id)
                if not contender.held_blocks and contender.remaining_tokens:
                    self._look_up(contender)
            ahead += contender.remaining_tokens

    def _partial_budget(self, now_s: float) -> PartialBudget:
        """So that a prompt that is whole meanwhile waits for a short step at most."""
        speed = self._speed
        return PartialBudget(
            max(self.block_size, speed.short_step_tokens),
            self._survival.slices,
            price=self._whole_prompts.per_s(now_s) / speed.tokens_per_s if speed.tokens_per_s else 0.0,
            fixed_tokens=max(self.block_size, speed.fixed_tokens),
            overdue_since_s=now_s - self._starvation_s,
        )

    @property
    def _most_adapters(self) -> int:
        return self.lora_config.max_loras if self.lora_config is not None else 0

    def _runs_too_many_adapters(self) -> bool:
        """More than one step may compute: some were left out while others ran. vLLM never leaves any out."""
        if self.lora_config is None:
            return False
        return len({vllm_private.adapter_of(request) for request in self.running} - {0}) > self._most_adapters

    def _has_turns(self) -> bool:
        return bool(self._refused or self._lost_idle or any(request.num_output_tokens for request in self.running))

    def _turn(self, contender: Contender) -> int:
        """What goes before the policy's order, so that a step always gets something done.

        0: has begun to answer; it needs one token, and cannot give up its place in the model runner. 2: was refused
        before; goes last now, so that those which hold blocks can finish and give them up. 3: lost its blocks while it
        was idle.
        """
        if contender.request_id in self._lost_idle:
            return 3
        has_begun = self.requests[contender.request_id].num_output_tokens and contender.remaining_tokens <= 1
        if contender.tenure is Tenure.RUNNING and has_begun:
            return 0
        return 2 if contender.request_id in self._refused and not contender.held_blocks else 1

    def _present(self) -> list[tuple[Any, Tenure, int]]:
        """Who contends for the step, and its place in its queue."""
        found: list[tuple[Any, Tenure, int]] = []
        for index, request in enumerate(self.running):
            found.append((request, Tenure.RUNNING, index))
        for queue in (self.kv_holding_waiting, self.waiting):
            for index, request in enumerate(queue):
                if request.status is not PARKED and not vllm_private.is_ready(self, request):
                    continue
                preempted = request.status is RequestStatus.PREEMPTED or queue is self.kv_holding_waiting
                tenure = Tenure.PREEMPTED if preempted else Tenure.WAITING
                found.append((request, tenure, index))
        return found

    def _contender(self, request: Any, tenure: Tenure, index: int, now_s: float) -> Contender:
        ready = self._ready_tokens(request)
        blocks = vllm_private.request_blocks(self, request.request_id)
        is_last, is_overdue = last_step_runs(request), request.waiting_since_s <= now_s - self._starvation_s
        remaining = request.num_tokens_with_spec + request.num_output_placeholders - ready
        if is_last or self._has_to_wait(request, holds_blocks=bool(blocks)):
            remaining = 0
        return Contender(
            request_id=request.request_id,
            complete=not request.input_open,
            arrival_s=request.arrived_s,
            last_chunk_s=request.last_chunk_s,
            waiting_since_s=request.waiting_since_s,
            computed_tokens=ready,
            tenure=tenure,
            queue_index=index,
            remaining_tokens=max(0, remaining),
            left_tokens=self._speed.left_tokens(remaining, now_s - request.last_chunk_s),
            known_tokens=request.num_tokens,
            held_blocks=len(blocks),
            shared_blocks=vllm_private.shared_blocks(blocks),
            first_block=blocks[0].block_id if blocks else -1,
            leased_blocks=self._leased.in_front(blocks),
            evictable=self._is_evictable(request) and not is_last,
            adapter=vllm_private.adapter_of(request),
            priority=request.priority,
            tenant=tenant_of(request),
            survival=1.0 if is_overdue else self._survival.survival(request.request_id, ready),
        )

    def _is_evictable(self, request: Any) -> bool:
        return request.request_id not in self._loading and vllm_private.may_free_blocks(self, request)

    def _has_to_wait(self, request: Any, *, holds_blocks: bool) -> bool:
        if request.status is PARKED or (request.num_stale_output_tokens and not request.drop_stale_output):
            return True
        if not request.input_open and not self._has_grammar(request):
            return True
        return request.lost_idle and not holds_blocks and not self._takes_idle_room(request)

    def _has_grammar(self, request: Any) -> bool:
        """Whether it can be sampled from: a session computes its prompt while its grammar is compiled."""
        wanted = request.structured_output_request
        if wanted is not None and isinstance(wanted.grammar, Exception):
            self.grammar_compile_error_reqs.add(request.request_id)
            return False
        return wanted is None or wanted.grammar is not None

    def _takes_idle_room(self, request: Any) -> bool:
        """Whether free blocks hold all that an idle session lost; they are its own then."""
        needed = -(-request.num_tokens // self.block_size)
        fits = needed <= self._idle_room_blocks
        self._idle_room_blocks -= needed * fits
        return fits

    def _look_up(self, contender: Contender) -> None:
        """What the prefix cache has of a contender that holds nothing, in either tier. Changes nothing of the cache.

        What is loaded from host memory takes blocks and no budget, as vLLM itself counts it.
        """
        request = self.requests[contender.request_id]
        blocks, hit_tokens, _ = self.kv_cache_manager.get_computed_blocks(request)
        if not contender.computed_tokens:
            # A swapped session takes its own copy back instead.
            if self.waits_for_others_load(request, hit_tokens):
                contender.remaining_tokens = 0
                return
            hit_tokens += self.tokens_in_host_memory(request, hit_tokens)
        if hit_tokens > contender.computed_tokens:
            contender.remaining_tokens = request.num_tokens - hit_tokens
        in_use = vllm_private.blocks_in_use(blocks)
        self._shared_hits[contender.request_id] = contender.shared_blocks = in_use
        if in_use:
            contender.first_block = blocks.get_block_ids()[0][0]
            contender.leased_blocks = self._leased.in_front(blocks.blocks[0])

    def _capacity_blocks(self) -> int:
        """Blocks that contenders may hold between them: all but those of others, and those that overdue pulls or copies
        in the background alone hold."""
        held = vllm_private.blocks_held_by_transfers(self)
        return int(vllm_private.pool_of(self).num_gpu_blocks) - 1 - len(self._leased) - held

    def _blocks_of_others(self, present: Set[str]) -> dict[str, list[Any]]:
        """Of those that hold blocks and do not contend: leases, loads, and who waits for an adapter's place."""
        held = {name: vllm_private.request_blocks(self, name) for name in self.requests.keys() - present}
        return {name: blocks for name, blocks in held.items() if blocks}

    # Phase 2.

    def _inflight_prefill_reserved_blocks(self) -> int:
        """What is pulled or loaded is admitted beside those that vLLM keeps blocks for: the plan has charged them."""
        return 0 if self._plans_steps else super()._inflight_prefill_reserved_blocks()

    def _make_room(self, plan: StepPlan, now_s: float) -> None:
        needed = sum(self._blocks_needed(grant) for grant in plan.grants)
        pool = vllm_private.pool_of(self)
        for victim in victims(plan.left_out, plan.kept):
            if pool.get_num_free_blocks() >= needed:
                break
            self._preempt_left_out(self.requests[victim.request_id], now_s)
        newcomers = sum(grant.contender.tenure is not Tenure.RUNNING for grant in plan.grants)
        excess = len(self.running) + newcomers - self.max_num_active_reqs
        for contender in reversed(plan.left_out):
            if excess <= 0:
                break
            excess -= self._set_aside(self.requests[contender.request_id], now_s)
        self._end_standstill(plan, now_s)

    def _blocks_needed(self, grant: Grant) -> int:
        """Free blocks that the grant takes; whole blocks of a prefix hit that nobody holds count as free ones."""
        contender = grant.contender
        have = contender.held_blocks or self._shared_hits.get(contender.request_id, 0)
        newcomer = contender.tenure is not Tenure.RUNNING
        watermark = self.kv_cache_manager.watermark_blocks if newcomer else 0
        return max(0, -(-reached_tokens(grant) // self.block_size) - have) + int(watermark)

    def _preempt_left_out(self, request: Any, now_s: float) -> None:
        """Takes the blocks of a holder, to host memory or for good."""
        request_id = request.request_id
        was_idle = request.status is PARKED or request.lost_idle
        # A sampled token that is still on its way has no place in what is swapped.
        tokens = min(request.num_computed_tokens, request.num_tokens - (not request.input_open))
        blocks = [block.block_id for block in vllm_private.request_blocks(self, request_id)]
        slots = self.swaps.free_slots if self.swaps is not None else 0
        how = choose(self.preemption_strategy, tokens, -(-tokens // self.block_size), slots, self.cost_model)
        swapped = how is Preemption.SWAP and self.swaps.swap_out(request_id, blocks, tokens)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            vllm_private.preempt(self, request, now_s, drop_stale_output=self.requires_kv_delivery)
        else:
            self._preempt_waiting(request)
        self.prev_step_scheduled_req_ids.discard(request_id)
        if request.input_open:
            self._set_lost(request, was_idle and self._is_behind(request))
            self._requeue_preempted(request)
        if request.status is not PARKED and request.waiting_since_s == NEVER:
            request.waiting_since_s = now_s
        ledger = self._sessions.get(request_id)
        if ledger is not None:
            ledger.preempt(swapped=swapped, tokens=tokens, now_s=now_s)
            ledger.ready(self._ready_tokens(request))

    def _preempt_waiting(self, request: Any) -> None:
        """As vLLM's `_preempt_request`, for one that does not run but holds blocks."""
        self._take_out(request)
        vllm_private.free_blocks(self, request)
        vllm_private.drop_reservation(self, request)
        request.num_computed_tokens = 0
        self.reset_preempted_req_ids.add(request.request_id)
        self.waiting.prepend_request(request)

    def _requeue_preempted(self, request: Any) -> None:
        """A session comes back as a new request, and only when there is something to compute."""
        if self._is_behind(request) and not request.lost_idle:
            request.status = RequestStatus.WAITING
        else:
            self._set_parked(request)
            self.deferred_waiting.add(request)

    def _set_aside(self, request: Any, now_s: float) -> bool:
        """Frees the place of a running request in the model runner; it keeps its blocks. False: it has to stay."""
        if request.status is not RequestStatus.RUNNING or request.num_output_tokens or not request.num_computed_tokens:
            return False
        if request.num_output_placeholders:
            return False
        self._leave_model_runner(request)
        if request.status is PARKED:
            # The step that computes the last of its tokens runs still.
            self._sessions[request.request_id].caught_up(now_s)
        return True

    def _note_scheduled(self, output: SchedulerOutput, before: dict[str, int], now_s: float) -> None:
        for request_id, computed in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if request.waiting_since_s > now_s - self._starvation_s:
                # An overdue one keeps its turn until it has caught up: those it went before would only take it back.
                request.waiting_since_s = NEVER
            ledger = self._sessions.get(request_id)
            if ledger is not None:
                found = 0 if before.get(request_id) else request.num_computed_tokens - computed
                ledger.scheduled(found, computed, request.num_computed_tokens, now_s)
        for request_id in before.keys() - output.num_scheduled_tokens.keys():
            self._note_unscheduled(self.requests[request_id], before[request_id], now_s)

    def _note_unscheduled(self, request: Any, computed_before: int, now_s: float) -> None:
        """Planned, and then not scheduled: it is being loaded, no block was free, or vLLM preempted it for another."""
        ledger = self._sessions.get(request.request_id)
        if request.waiting_since_s == NEVER:
            request.waiting_since_s = now_s
        if ledger is not None and self.is_loading(request.request_id):
            ledger.found(request.num_computed_tokens)
        if ledger is not None and request.status is RequestStatus.PREEMPTED and not ledger.preempted:
            ledger.preempt(swapped=False, tokens=computed_before, now_s=now_s)
            ledger.ready(0)
            if request.input_open:
                self._requeue_preempted(request)
