"""A worker's engine in simulated time with vLLM's real scheduler in it; arithmetic takes the place of the model.

The scheduler decides each step as in production: which requests it admits and preempts, which blocks it takes, finds
and gives up. The cost model says how long the step takes; what is sampled is arbitrary. What comes in meanwhile is
taken in between two steps, as the engine's thread does.

Steps are taken at once, up to a bound (a leap), where the scheduler would do nothing but give each running request
one token: all of them decode, none ends before the last step, and none could join. What comes in cuts a leap short.
Only blocks are then allocated later than they would be, and there have to be enough of them.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from cluster_core.engine_jobs import SessionMode, SessionRecord
from cluster_core.engine_reports import EngineCosts
from cluster_sim.costs.step_work import CostModel
from cluster_sim.engines.engine import EngineTotals, Outcome, OutcomeKind, SimInput, SimJob
from cluster_sim.engines.vllm_copies import Copies
from cluster_sim.engines.vllm_schedulers import (
    HANDS_OFF,
    PULLS,
    BlockNames,
    SimClock,
    VllmEngineSettings,
    make_scheduler,
)
from cluster_sim.engines.vllm_steps import TOKEN, StepBegin, StepModel, Steps
from kv_transfer import vllm_private
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys
from prefill_worker.partial_budget import HELD_NAP_S
from worker_runtime.step_costs import StepCosts

_NEVER = math.inf
_NOTHING = ClaimChange()
# Steps without work in a row: one may leave the next one something to do.
_VAIN_STEPS = 3


@dataclass(slots=True, eq=False)
class _Entry:
    """One job. names: of its blocks. preemptions: as counted so far. asked_s: when it wanted to pull."""

    job: SimJob
    request: Any
    names: BlockNames | None = None
    is_session: bool = False
    preemptions: int = 0
    asked_s: float = 0.0


class VllmSimEngine:
    """See `engines.engine.SimEngine`. The settings' blocks have the size of those that jobs have keys of."""

    def __init__(self, cost_model: CostModel, settings: VllmEngineSettings) -> None:
        self.totals = EngineTotals()
        self.settings = settings
        self._clock = SimClock()
        with self._clock:
            self._scheduler = make_scheduler(settings)
        self._pool = vllm_private.pool_of(self._scheduler)
        self._measured = StepCosts()
        self._entries: dict[str, _Entry] = {}
        self._parameters: dict[int, Any] = {}
        self._pulling: set[str] = set()
        self._step_model = StepModel(cost_model, settings, self._scheduler)
        self._readers = self._step_model.readers
        self._copies = Copies(cost_model, settings.block_tokens)
        self._steps: Steps | None = None
        # What has come in while a step ran; when the next step is wanted while none runs.
        self._commands: list[Callable[[], None]] = []
        self._wanted_s = _NEVER
        self._factor = 1.0
        self._outcomes: list[Outcome] = []
        self._refused = 0
        self.records: dict[int, SessionRecord] = {}

    @property
    def scheduler(self) -> Any:
        """vLLM's, to look at."""
        return self._scheduler

    # For the cluster.

    def add(self, job: SimJob, now_s: float) -> None:
        self._take(now_s, lambda: self._add(job))

    def open(self, job: SimJob, first: SimInput, mode: SessionMode, now_s: float) -> None:
        """For settings of the kind STREAMING. `records` has what happened to a session that has ended, until it is
        taken out."""
        self._take(now_s, lambda: self._open(job, first, mode))

    def take_input(self, number: int, following: SimInput, now_s: float) -> None:
        self._take(now_s, lambda: self._take_in(str(number), following))

    def landed(self, number: int, now_s: float) -> None:
        self._take(now_s, lambda: self._landed(str(number), now_s))

    def release(self, number: int, now_s: float) -> None:
        self._take(now_s, lambda: self._release(str(number)))

    def abort(self, number: int, now_s: float) -> None:
        self._catch_up(now_s)
        self._outcomes = [each for each in self._outcomes if each.job.number != number]
        self._entries.pop(str(number), None)
        self._take(now_s, lambda: self._abort(str(number)))

    def next_s(self) -> float:
        if self._outcomes:
            return self._clock.now_s
        return self._next_turn_s()

    def advance(self, now_s: float) -> Sequence[Outcome]:
        self._catch_up(now_s)
        while self._next_turn_s() <= now_s:
            self._turn()
        self._clock.now_s = max(self._clock.now_s, now_s)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def claim_changes(self) -> ClaimChange:
        if not any(self._pool.touched):
            return _NOTHING
        changes: ClaimChange = self._pool.claim_changes()
        return changes

    def slow_down(self, factor: float, now_s: float) -> None:
        self._catch_up(now_s)
        self._cut(now_s)
        self._factor = factor

    def load(self) -> tuple[int, int]:
        return self._pool.get_num_free_blocks(), self._pool.num_gpu_blocks - 1

    def costs(self) -> EngineCosts:
        return self._measured.costs()

    def check_invariants(self) -> None:
        scheduler = self._scheduler
        held = [each for name in scheduler.requests for each in vllm_private.request_blocks(scheduler, name)]
        host_tier = scheduler.connector.host_tier
        if host_tier is not None:
            self._pool.check_invariants()
            held += host_tier.held_blocks()
        owners = Counter(each.block_id for each in held)
        for block in held:
            assert block.ref_cnt == owners[block.block_id], f"block {block.block_id}: {block.ref_cnt} references"
        free, total = self.load()
        assert free + len(owners) == total, f"{free} free and {len(owners)} held of {total} blocks"
        assert self._steps or self._readers.names.keys() <= {each.request_id for each in scheduler.running}
        if not self._readers.names:
            assert not self._readers.repeated_tokens, "blocks of nobody are counted as read"

    # What comes in.

    def _take(self, now_s: float, command: Callable[[], None]) -> None:
        """Between two steps."""
        self._catch_up(now_s)
        if self._steps is not None:
            self._cut(now_s)
            self._commands.append(command)
            return
        self._clock.now_s = now_s
        with self._clock:
            command()
        self._wanted_s = now_s

    def _add(self, job: SimJob) -> None:
        if not self._fits(job.prompt_tokens + job.output_tokens):
            self._outcomes.append(Outcome(job, OutcomeKind.REFUSED, self._clock.now_s))
            return
        self._scheduler.add_request(self._request(job, job.keys, [TOKEN] * job.prompt_tokens))

    def _open(self, job: SimJob, first: SimInput, mode: SessionMode) -> None:
        if self._refuses(job, first):
            return
        request = self._request(job, first.keys, list(first.tokens))
        self._entries[request.request_id].is_session = True
        self._scheduler.open_session(request, mode)
        if first.is_last:
            self._scheduler.close_input(request.request_id, ())

    def _take_in(self, name: str, given: SimInput) -> None:
        entry, scheduler = self._entries.get(name), self._scheduler
        if entry is None or self._refuses(entry.job, given):
            return
        if entry.names is not None:
            entry.names.known(given.keys)
        if given.replaces:
            scheduler.replace_prompt(name, given.tokens)
        if given.is_last:
            scheduler.close_input(name, () if given.replaces else given.tokens)
        elif not given.replaces:
            scheduler.extend_prompt(name, given.tokens)

    def _refuses(self, job: SimJob, given: SimInput) -> bool:
        """Whether a session's prompt has outgrown the device; then it is gone."""
        if self._fits(given.prompt_tokens + job.output_tokens):
            return False
        name = str(job.number)
        if self._entries.pop(name, None) is not None:
            self._abort(name)
        self._outcomes.append(Outcome(job, OutcomeKind.REFUSED, self._clock.now_s))
        return True

    def _fits(self, tokens: int) -> bool:
        """Whether there is room for so many on an empty device."""
        blocks = -(-tokens // self.settings.block_tokens)
        return blocks <= self.settings.device_blocks and tokens <= self.settings.max_model_tokens

    def _request(self, job: SimJob, keys: Keys, tokens: list[int]) -> Any:
        """vLLM's own, and an entry for it."""
        parameters = self._parameters.get(job.own_tokens)
        if parameters is None:
            parameters = SamplingParams(max_tokens=job.own_tokens, temperature=0.0, ignore_eos=True)
            self._parameters[job.own_tokens] = parameters
        names = BlockNames(job.number, keys, self.settings.block_tokens) if self.settings.prefix_caching else None
        name, now_s = str(job.number), self._clock.now_s
        request = Request(name, tokens, parameters, None, arrival_time=now_s, block_hasher=names)
        if job.pulls or job.hand_off:
            request.kv_transfer_params = {PULLS: job.pulls, HANDS_OFF: job.hand_off}
        self._entries[name] = _Entry(job, request, names)
        return request

    def _landed(self, name: str, landed_s: float) -> None:
        if name not in self._pulling:
            return
        self._pulling.remove(name)
        if entry := self._entries.get(name):
            lacked = entry.request.prefill_stats.num_external_cached_tokens if entry.request.prefill_stats else 0
            self._measured.pulled(landed_s - entry.asked_s, lacked)
        self._report(KVConnectorOutput(finished_recving={name}))

    def _release(self, name: str) -> None:
        request = self._scheduler.requests.get(name)
        if request is not None and request.is_finished() and name not in self._pulling:
            self._report(KVConnectorOutput(finished_sending={name}))
            self._entries.pop(name, None)

    def _abort(self, name: str) -> None:
        request = self._scheduler.requests.get(name)
        if request is None:
            return
        if not request.is_finished():
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self._readers.leave(name)
        if name in self._pulling:
            self._landed(name, self._clock.now_s)
        elif not (tier := self._scheduler.connector.host_tier) or not tier.is_loading(name):
            self._release(name)

    def _report(self, transfers: KVConnectorOutput) -> None:
        """As a step without work that brings back what the workers have to say."""
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=transfers)
        self._scheduler.update_from_output(SchedulerOutput.make_empty(), output)

    # Time.

    def _next_turn_s(self) -> float:
        return self._steps.end_s if self._steps is not None else min(self._wanted_s, self._copies.next_s())

    def _catch_up(self, now_s: float) -> None:
        """All that was over before now."""
        while self._next_turn_s() < now_s:
            self._turn()

    def _turn(self) -> None:
        """The steps under way end, if there are any; what has come in is taken in; the next step begins."""
        self._clock.now_s = max(self._clock.now_s, self._next_turn_s())
        self._wanted_s = _NEVER
        with self._clock:
            if self._steps is not None:
                steps, self._steps = self._steps, None
                self._end(steps)
            else:
                report = self._copies.ended(self._clock.now_s)
                if report is not None:
                    self._report(KVConnectorOutput(kv_connector_worker_meta=report))
            commands, self._commands = self._commands, []
            for command in commands:
                command()
            self._begin()

    def _cut(self, now_s: float) -> None:
        """Steps that have not begun do not happen as planned."""
        steps = self._steps
        if steps is not None and len(steps.ends_s) > 1:
            del steps.ends_s[bisect_right(steps.ends_s, now_s) + 1 :]

    # Steps.

    def _begin(self) -> None:
        scheduler = self._scheduler
        copies_s, vain_steps = 0.0, 0
        while self._has_work() and (vain_steps < _VAIN_STEPS or self._goes_on()):
            output = scheduler.schedule()
            self._take_pulls()
            self._count_preemptions(output)
            copies_s += self._begin_copies(output.kv_connector_metadata)
            if output.total_num_scheduled_tokens:
                begin = StepBegin(self._clock.now_s, copies_s, self._factor, len(self._pulling))
                self._steps = self._step_model.steps_of(output, begin)
                return
            scheduler.update_from_output(output, ModelRunnerOutput(req_ids=[], req_id_to_index={}))
            vain_steps += 1
        if self._has_work() and getattr(scheduler, "held_nap_s", None):
            self._wanted_s = self._clock.now_s + HELD_NAP_S

    def _goes_on(self) -> bool:
        """Whether a step without work, after some others, leaves the next one something to do."""
        # A session that is refused goes last the next time, so one after the other may have to be refused.
        before, self._refused = self._refused, int(getattr(self._scheduler, "refused_count", 0))
        return self._refused > before

    def _has_work(self) -> bool:
        """Whether vLLM's engine would step: for requests, once more after the last has ended, and to begin copies."""
        scheduler = self._scheduler
        if scheduler.get_num_unfinished_requests() > len(self._pulling) or scheduler.finished_req_ids:
            return True
        return scheduler.connector.has_pending_push_work() and not self._copies.under_way

    def _take_pulls(self) -> None:
        pulled = self._scheduler.connector.pulled
        now_s = self._clock.now_s
        for name, tokens in pulled:
            self._pulling.add(name)
            if entry := self._entries.get(name):
                entry.asked_s = now_s
                self._outcomes.append(Outcome(entry.job, OutcomeKind.PULLS, now_s, tokens))
        pulled.clear()

    def _count_preemptions(self, output: Any) -> None:
        for name in output.preempted_req_ids or ():
            self._readers.leave(name)
            if (entry := self._entries.get(name)) and entry.request.num_preemptions > entry.preemptions:
                entry.preemptions = entry.request.num_preemptions
                self.totals.preemptions += 1

    def _begin_copies(self, metadata: Any) -> float:
        """Returns the seconds of those that the step waits for."""
        loaded_before = self._copies.loaded_tokens
        seconds = self._copies.begin(metadata, self._clock.now_s)
        if self._copies.loaded_tokens != loaded_before:
            self._measured.loaded(self._copies.loaded_s, self._copies.loaded_tokens)
        return seconds

    def _end(self, steps: Steps) -> None:
        count, totals = len(steps.ends_s), self.totals
        computed = self._step_model.computed(steps, self._copies.ended(self._clock.now_s))
        outputs = self._scheduler.update_from_output(steps.output, computed)
        seconds = steps.end_s - steps.began_s
        totals.busy_s += seconds
        totals.prefill_tokens += sum(tokens for _, tokens in steps.prefilled)
        totals.decode_tokens += steps.decoding * count
        totals.decode_steps += count if steps.decoding else 0
        self._measured.stepped(seconds / count, steps.prefilled, steps.decoding, steps.context_tokens)
        for each in outputs.values():
            for output in each.outputs:
                if output.finish_reason is not None or output.prefill_stats is not None:
                    self._take_output(output)

    def _take_output(self, output: Any) -> None:
        name, now_s = output.request_id, self._clock.now_s
        entry = self._entries.get(name)
        if entry is not None and output.prefill_stats is not None:
            computed = self._count_hits(entry, output.prefill_stats)
            self._outcomes.append(Outcome(entry.job, OutcomeKind.FIRST_TOKEN, now_s, computed))
        if output.finish_reason is None:
            return
        self._readers.leave(name)
        if entry is None:
            return
        if entry.is_session:
            record = self._scheduler.take_session_record(name)
            self.records[entry.job.number] = record
            self.totals.invalidated_tokens += record.tokens.invalidated_tokens
        self._outcomes.append(Outcome(entry.job, OutcomeKind.FINISHED, now_s))
        if not entry.job.hand_off:
            del self._entries[name]

    def _count_hits(self, entry: _Entry, stats: Any) -> int:
        """Returns how many of the prompt's tokens were computed here."""
        if entry.is_session:
            found = int(self._scheduler.session_cached_tokens(entry.request.request_id))
            self.totals.device_hit_tokens += found
            return int(entry.request.num_prompt_tokens) - found
        if not entry.job.pulls:
            self.totals.device_hit_tokens += stats.num_local_cached_tokens
            self.totals.host_hit_tokens += stats.num_external_cached_tokens
        return int(stats.num_computed_tokens)
