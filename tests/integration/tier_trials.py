"""What `test_tiers_on_the_engine.py` lets a real engine do, in a process of its own."""

import os
import threading
from typing import Any
from unittest import mock

from cluster_configs.schema import EngineSection, HandoffSection, ModelSection, TiersSection
from cluster_core.engine_jobs import EngineJob, SamplingSpec, TenantShare
from kv_transfer import vllm_private
from kv_transfer.between_steps import look_before_steps
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment

DEVICE_BLOCKS = 24
LESSON_SHARED, LESSON_OWN, LESSON_TOKENS = 97, 5, 20
_MOST_STEPS = 2000


class Engine:
    """One engine of a worker, stepped by hand; counts the tokens that its steps compute."""

    def __init__(self, role: EngineRole) -> None:
        engine = EngineSection(kv_blocks=DEVICE_BLOCKS, max_model_len=320, max_batched_tokens=192)
        # By last use, so that what is asked for in between pushes a prompt off the device.
        tiers = TiersSection(host_gib=0.01, frequency_threshold=1, eviction="lru")
        settings = EngineSettings(ModelSection(), engine, HandoffSection(), role, tiers=tiers)
        os.environ.update(engine_environment(settings))
        from vllm.v1.engine.llm_engine import LLMEngine

        from worker_runtime.vllm_arguments import engine_args

        self.engine = LLMEngine.from_engine_args(engine_args(settings))
        look_before_steps(self.engine)
        self.scheduler: Any = vllm_private.scheduler_of(self.engine)
        self.tiers = self.scheduler.tiers
        self.pool = vllm_private.pool_of(self.scheduler)
        self.computed = self.steps = self._number = 0
        schedule = self.scheduler.schedule

        def counted(*arguments: Any) -> Any:
            output = schedule(*arguments)
            self.computed += output.total_num_scheduled_tokens
            self.steps += bool(output.total_num_scheduled_tokens)
            return output

        self.scheduler.schedule = counted
        # Of the full blocks of the prompt that was asked for last.
        self.hashes: list[Any] = []
        accessed = self.tiers.accessed

        def noted(hashes: list[Any], first_depth: int = 0, **whose: Any) -> None:
            self.hashes = list(hashes) if not first_depth else self.hashes
            accessed(hashes, first_depth, **whose)

        self.tiers.accessed = noted

    def answer(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        reads_cache: bool = True,
        salt: str | None = None,
        tenant: str = "",
    ) -> list[Any]:
        """Tokens and their log-probabilities; everything has ended afterwards, copies in the background too."""
        self.start(prompt, max_tokens, reads_cache=reads_cache, salt=salt, tenant=tenant)
        found: list[Any] = []
        for _ in range(_MOST_STEPS):
            if not self.scheduler.has_requests():
                break
            for output in self.engine.step():
                rows = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
                found += [(token, row[token].logprob) for token, row in rows]
        assert not self.scheduler.has_requests(), "it does not end"
        self.pool.check_invariants()
        assert vllm_private.block_counts(self.engine) == (DEVICE_BLOCKS - 1, DEVICE_BLOCKS - 1), "a block is lost"
        return found

    def start(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        reads_cache: bool = True,
        salt: str | None = None,
        tenant: str = "",
    ) -> None:
        from worker_runtime.vllm_conversion import sampling_params

        sampling = SamplingSpec(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        params = sampling_params(EngineJob("", (), sampling, tenant=TenantShare(tenant)), 1.0)
        params.skip_reading_prefix_cache = not reads_cache
        self._number += 1
        given: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        self.engine.add_request(str(self._number), given | ({"cache_salt": salt} if salt else {}), params)

    def counted(self, prompt: list[int], **how: Any) -> tuple[list[Any], int]:
        """The answer, and how many tokens were computed for it."""
        before = self.computed
        return self.answer(prompt, **how), self.computed - before


def tokens(count: int, seed: int) -> list[int]:
    return [(seed * 7919 + index * index * 31 + index) % 250 for index in range(count)]


def lesson(engine: Engine) -> dict[str, Any]:
    """97 shared tokens and 5 own: what the second request computes with the cache, and without."""
    shared = tokens(LESSON_SHARED, 1)
    engine.answer(shared + tokens(LESSON_OWN, 2), LESSON_TOKENS)
    prompt, steps = shared + tokens(LESSON_OWN, 3), engine.steps
    with_cache, computed = engine.counted(prompt, max_tokens=LESSON_TOKENS)
    steps = engine.steps - steps
    without, all_computed = engine.counted(prompt, max_tokens=LESSON_TOKENS, reads_cache=False)
    return {"computed": computed, "steps": steps, "all_computed": all_computed, "same": with_cache == without}


def round_trip(engine: Engine) -> dict[str, Any]:
    """A prompt that others have pushed off the device comes back from host memory."""
    hot = tokens(200, 11)
    first, hashes = engine.answer(hot), engine.hashes
    copied = engine.tiers.counters.copied_out
    for seed in range(20, 26):
        engine.answer(tokens(300, seed))
    on_device = len(engine.tiers.match(hashes).device)
    hits = engine.tiers.counters.host_hit_tokens
    second, computed = engine.counted(hot)
    return {
        "copied_out": copied,
        "slots": engine.tiers.slots.size,
        "on_device": on_device,
        "host_hit_tokens": engine.tiers.counters.host_hit_tokens - hits,
        "computed": computed,
        "same": first == second,
    }


def idle(engine: Engine) -> dict[str, Any]:
    """An engine that has nothing else to do goes on copying, however few blocks may be on their way at once."""
    host_tier = engine.scheduler.connector.host_tier
    # All trials share an engine, which got its budget when it started.
    with mock.patch.object(host_tier, "_budget", 2):
        engine.answer(tokens(310, 71), 1)
    # Offers that wait are visible only after they are copied.
    return {"in_host": len(engine.tiers.host_slots_of(engine.hashes, 0, 9)), "waiting": len(host_tier._offers)}


def reset(engine: Engine) -> dict[str, Any]:
    """After the cache was reset nothing is found in either tier."""
    prompt = tokens(200, 11)
    before = engine.answer(prompt)
    done = engine.engine.reset_prefix_cache()
    left = len(engine.tiers.tree)
    again, computed = engine.counted(prompt)
    return {"done": done, "left": left, "computed": computed, "same": before == again}


def salts(engine: Engine) -> dict[str, Any]:
    """The same prompt of another tenant: nothing of it is found, and nothing gets hotter."""
    prompt = tokens(100, 41)
    engine.counted(prompt, salt="one")
    frequencies = _frequencies(engine)
    _, other = engine.counted(prompt, salt="two")
    raised = sum(_frequencies(engine).get(each, 0) > count for each, count in frequencies.items())
    _, same = engine.counted(prompt, salt="one")
    return {"other": other, "same": same, "raised_by_other": raised}


def shares(engine: Engine) -> dict[str, Any]:
    """A prompt of one tenant, asked for twice, beside many of another, asked for once; then the same of nobody."""
    left, same = [], True
    for seed, (tenant, other) in ((81, ("one", "two")), (82, ("", ""))):
        prompt = tokens(100, seed)
        answers = [engine.answer(prompt, tenant=tenant) for _ in range(2)]
        hashes = engine.hashes
        for number in range(8):
            engine.answer(tokens(96, 10 * seed + number), 1, tenant=other)
        left.append(len(engine.tiers.match(hashes).device))
        answers += [engine.answer(prompt, tenant=tenant), engine.answer(prompt, reads_cache=False)]
        same &= all(each == answers[0] for each in answers)
    return {"on_device": left, "same": same}


def failing_copies(engine: Engine) -> dict[str, Any]:
    """Copies in the background raise: nothing is lost but the copies."""
    from kv_transfer.host_memory.host_pool import HostPool

    carry_out, prompt = HostPool.carry_out, tokens(200, 51)

    def raise_in_background(self: HostPool, copies: Any) -> None:
        if threading.current_thread().name.startswith("rachis-copies"):
            raise RuntimeError("no bytes today")
        carry_out(self, copies)

    failed, copied = engine.tiers.counters.copies_failed, engine.tiers.counters.copied_out
    # The engine makes its own pool; here its copies fail.
    with mock.patch.object(HostPool, "carry_out", raise_in_background):
        answers = [engine.answer(prompt) for _ in range(3)]
    counters = engine.tiers.counters
    during = {"failed": counters.copies_failed - failed, "copied_out": counters.copied_out - copied}
    answers.append(engine.answer(prompt))
    in_host = len(engine.tiers.host_slots_of(engine.hashes, 0, 6))
    return {**during, "in_host_afterwards": in_host, "same": all(each == answers[0] for each in answers)}


def aborts(engine: Engine) -> dict[str, Any]:
    """Requests that are aborted while their blocks are on their way, in both directions."""
    from vllm.v1.request import RequestStatus

    prompt = tokens(250, 61)
    expected = engine.answer(prompt)
    for turns in (1, 2, 3, 1, 2):
        for seed in (62, 63):
            engine.answer(tokens(300, seed))
        engine.start(prompt)
        for _ in range(turns):
            engine.engine.step()
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    return {"same": engine.answer(prompt) == expected}


def _frequencies(engine: Engine) -> dict[Any, int]:
    tracker = engine.tiers.tracker
    # The tracker lists its blocks to nobody; the test compares those of all tenants.
    return {each: tracker.hotness(each).frequency for each in list(tracker._near)}


TRIALS = {each.__name__: each for each in (lesson, round_trip, salts, shares, failing_copies, aborts, idle, reset)}


def tier_trials(role: EngineRole) -> dict[str, Any]:
    """What came of each trial, on one engine."""
    engine = Engine(role)
    results = {name: trial(engine) for name, trial in TRIALS.items()}
    engine.engine.engine_core.shutdown()
    return results
