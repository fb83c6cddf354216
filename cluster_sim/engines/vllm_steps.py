"""How long the steps take that vLLM's scheduler has decided on, and how many like them follow at once."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from cluster_sim.costs.step_work import CostModel, StepWork
from cluster_sim.engines.shared_reads import Readers
from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings
from kv_transfer import vllm_private
from kv_transfer.host_memory.copy_worker import CopyReport

# All prompts consist of it, and all answers.
TOKEN = 1
_LEAP_STEPS = 16
_LEARNING_POLICIES = ("bandit", "q_learning")


@dataclass(frozen=True, slots=True)
class StepBegin:
    """What of the engine a step depends on, beside what is scheduled."""

    at_s: float
    # Seconds of copies that the step waits for.
    copies_s: float
    # How many times as long steps take as the cost model says.
    factor: float
    # How many requests wait for their pulls.
    pulling: int


@dataclass(slots=True, eq=False)
class Steps:
    """A step under way, or several alike."""

    output: Any
    began_s: float
    # Of each step.
    ends_s: list[float]
    # Of each prompt, tokens before and in the step.
    prefilled: list[tuple[int, int]]
    # How many requests decode, and the tokens that they attend to.
    decoding: int
    context_tokens: int

    @property
    def end_s(self) -> float:
        return self.ends_s[-1]


class StepModel:
    """readers: of the requests that decode; the engine takes out those that end or are preempted."""

    def __init__(self, cost_model: CostModel, settings: VllmEngineSettings, scheduler: Any) -> None:
        self.readers = Readers(settings.block_tokens)
        self._model = cost_model
        self._settings = settings
        self._scheduler = scheduler
        # Of the step before.
        self._before: Container[str] = ()
        self._learns = settings.kind is SchedulerKind.DECODE and settings.decode.policy in _LEARNING_POLICIES

    def steps_of(self, output: Any, begin: StepBegin) -> Steps:
        """readers: gets the requests of the step that decode for the first time."""
        scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        cached, prefilled = output.scheduled_cached_reqs, []
        prefill_tokens, pairs, decoding, context = 0, 0.0, len(scheduled), 0
        names: Iterable[str] = scheduled
        if total == decoding:
            context = decoding + sum(cached.num_computed_tokens)
            context += sum(each.num_computed_tokens for each in output.scheduled_new_reqs)
        else:
            names = []
            rows = [(each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs]
            for name, before in (*rows, *zip(cached.req_ids, cached.num_computed_tokens, strict=True)):
                tokens = scheduled[name]
                if tokens == 1:
                    context += before + 1
                    names.append(name)
                else:
                    prefill_tokens += tokens
                    pairs += tokens * (before + tokens / 2)
                    prefilled.append((before, tokens))
            decoding = len(names)
        self._join(names)
        read = context - self.readers.repeated_tokens if decoding else 0
        work = StepWork(prefill_tokens, pairs, decoding, context, read)
        start_s = 0.0 if any(name in self._before for name in scheduled) else self._settings.step_start_s
        self._before = scheduled
        ends_s = [begin.at_s + begin.copies_s + start_s + self._model.step_s(work) * begin.factor]
        if not prefilled and self._settings.leaps:
            for step in range(1, self._alike(scheduled, begin.pulling)):
                grown = step * decoding
                work = StepWork(0, 0.0, decoding, context + grown, read + grown)
                ends_s.append(ends_s[-1] + self._model.step_s(work) * begin.factor)
        return Steps(output, begin.at_s, ends_s, prefilled, decoding, context)

    def computed(self, steps: Steps, copies: CopyReport | None) -> ModelRunnerOutput:
        """What the worker reports of the steps that have ended. The scheduler has seen the first of them only."""
        requests, further = self._scheduler.requests, len(steps.ends_s) - 1
        self._scheduler.alike_steps = 1 + further
        if further:
            for request in self._scheduler.running:
                request.append_output_token_ids([TOKEN] * further)
                request.num_computed_tokens += further
        names = list(steps.output.num_scheduled_tokens)
        sampled = [
            [] if (request := requests.get(name)) is None or request.is_prefill_chunk else [TOKEN] for name in names
        ]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=copies) if copies is not None else None,
        )

    def _join(self, names: Iterable[str]) -> None:
        """Those of them that decode for the first time since they were admitted."""
        readers, block_tokens = self.readers, self._settings.block_tokens
        for name in names:
            if name not in readers.names:
                full = self._scheduler.requests[name].num_prompt_tokens // block_tokens
                blocks = vllm_private.request_blocks(self._scheduler, name)[:full]
                readers.join(name, [each.block_id for each in blocks])

    def _alike(self, scheduled: dict[str, int], pulling: int) -> int:
        """How many steps are alike, with the one that has been scheduled."""
        scheduler, running = self._scheduler, self._scheduler.running
        if self._learns or len(scheduled) != len(running) or scheduler.connector.has_pending_push_work():
            return 1
        # A request that vLLM's own order has not admitted now finds no more room before another one has ended.
        waits = scheduler.waiting and self._settings.kind is not SchedulerKind.PLAIN
        if waits or len(scheduler.kv_holding_waiting) > pulling:
            return 1
        steps = _LEAP_STEPS
        for request in running:
            generated = request.num_output_tokens
            if not generated:
                return 1
            steps = min(steps, request.max_tokens - generated)
        needed = len(running) * (steps // self._settings.block_tokens + 1)
        return steps if needed <= vllm_private.pool_of(scheduler).get_num_free_blocks() else 1
