"""What `test_decode_engine.py` lets real engines do, in processes of their own."""

import os
import random
from typing import Any
from unittest import mock

from cluster_configs.schema import DecodeSection, EngineSection, HandoffSection, ModelSection, TiersSection
from cluster_core.engine_jobs import EngineJob, SamplingSpec
from decode_worker.batch_settings import BatchSettings
from decode_worker.stop_policies import POLICIES
from kv_transfer import batch_order, vllm_private
from kv_transfer.model_runners import SharedPrefixOrder
from tests.examples import WIDE
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment

REQUESTS = 40 if WIDE else 24
# Not enough for all that run at once: some are preempted.
DEVICE_BLOCKS = 26
PLACES = 8
_CLOSE = 1e-4
_MOST_STEPS = 4000


class Engine:
    def __init__(self, role: EngineRole) -> None:
        engine = EngineSection(
            kv_blocks=DEVICE_BLOCKS, max_model_len=640, max_batched_tokens=192, max_running_requests=PLACES
        )
        decode, tiers = DecodeSection(policy="fcfs", wait_bound_s=0.2), TiersSection(host_gib=0.0)
        settings = EngineSettings(ModelSection(), engine, HandoffSection(), role, tiers=tiers, decode=decode)
        os.environ.update(engine_environment(settings))
        from vllm.v1.engine.llm_engine import LLMEngine

        from worker_runtime.vllm_arguments import engine_args

        self.engine = LLMEngine.from_engine_args(engine_args(settings))
        self.scheduler: Any = vllm_private.scheduler_of(self.engine)
        self.preempted = 0
        # vLLM's method, which every preemption goes through.
        preempt = self.scheduler._preempt_request

        def counted(*arguments: Any, **named: Any) -> None:
            self.preempted += 1
            preempt(*arguments, **named)

        # The counting one, in its place.
        self.scheduler._preempt_request = counted

    def add(self, job: EngineJob) -> str:
        from worker_runtime.vllm_conversion import sampling_params

        prompt = {"prompt_token_ids": list(job.token_ids)}
        name: str = self.engine.add_request(job.request_id, prompt, sampling_params(job, 30.0), priority=job.priority)
        return name

    def step(self, answers: dict[str, list[tuple[int, float]]]) -> None:
        for output in self.engine.step():
            answer = output.outputs[0]
            rows = zip(answer.token_ids, answer.logprobs or (), strict=True)
            answers.setdefault(output.request_id, []).extend((token, row[token].logprob) for token, row in rows)

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def jobs() -> list[EngineJob]:
    """Prompts of a tree of prefixes, greedy and sampled by seed."""
    rng = random.Random(3)

    def text(tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(380) for _ in range(tokens))

    roots = [text(rng.choice((64, 130, 200))) for _ in range(3)]
    prefixes = [(), *roots, *(root + text(64) for root in roots for _ in range(2))]
    found = []
    for number in range(REQUESTS):
        seeded = rng.random() < 0.3
        sampling = SamplingSpec(
            max_tokens=rng.randint(1, 80),
            temperature=0.8 if seeded else 0.0,
            seed=number if seeded else None,
            repetition_penalty=rng.choice((1.0, 1.2)),
            logprobs=1,
            ignore_eos=True,
        )
        prompt = rng.choice(prefixes) + text(rng.randint(1, 50))
        found.append(EngineJob(f"job-{number}", prompt, sampling, priority=rng.choice((0, 0, -1))))
    return found


def alone(engine: Engine) -> list[list[tuple[int, float]]]:
    """Of each job, one after the other."""
    answers: dict[str, list[tuple[int, float]]] = {}
    for job in jobs():
        engine.add(job)
        while engine.engine.has_unfinished_requests():
            engine.step(answers)
    return [answers[job.request_id] for job in jobs()]


def together(engine: Engine, settings: BatchSettings, expected: list[list[tuple[int, float]]]) -> dict[str, Any]:
    """All jobs, some in every few steps; one in eight is aborted on its way."""
    engine.scheduler.use_policy(settings)
    assert engine.scheduler.reset_prefix_cache()
    rng, answers = random.Random(settings.policy), dict[str, list[tuple[int, float]]]()
    waiting, aborted, scattered, batches = jobs()[::-1], set(), 0, 0
    runner, engine.preempted = vllm_private.model_runner_of(engine.engine), 0
    for _ in range(_MOST_STEPS):
        if not waiting and not engine.scheduler.has_requests():
            break
        for _ in range(rng.choice((0, 0, 1, 3))):
            if waiting:
                engine.add(waiting.pop())
        if rng.random() < 0.02 and engine.scheduler.running:
            name = rng.choice(engine.scheduler.running).request_id
            engine.engine.abort_request([name], internal=True)
            aborted.add(name.rsplit("-", 1)[0])
        engine.step(answers)
        scattered += isinstance(runner, SharedPrefixOrder) and is_scattered(runner)
        batches += 1
    wrong = [
        job.request_id
        for job, its in zip(jobs(), expected, strict=True)
        if job.request_id not in aborted and not same(answers.get(job.request_id, []), its)
    ]
    free, all_blocks = vllm_private.block_counts(engine.engine)
    report = engine.scheduler.decode_report()
    return {
        "wrong": wrong, "aborted": len(aborted), "preempted": engine.preempted, "scattered": scattered,
        "batches": batches,
        "lost_blocks": all_blocks - free, "admissions": dict(report.admissions), "left": len(engine.scheduler.requests),
    }  # fmt: skip


def same(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> bool:
    return [token for token, _ in one] == [token for token, _ in other] and all(
        abs(first - second) < _CLOSE for (_, first), (_, second) in zip(one, other, strict=True)
    )


def is_scattered(runner: Any) -> bool:
    """Whether rows that share a prefix lie apart."""
    batch = runner.input_batch
    table, rows = batch.block_table[0], batch.num_reqs
    keys = batch_order.shared_keys(table.block_table.np[:rows], table.num_blocks_per_row[:rows].tolist())
    runs = sum(one != other for one, other in zip(keys, [None, *keys], strict=False))
    return runs > len(set(keys))


def decode_trials() -> dict[str, Any]:
    """What came of each policy on one engine. Where Rachis orders rows (V2 of vLLM's model runners has an order of its
    own): of rows that are not ordered, too, and last of a planted bug."""
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    plain = Engine(EngineRole.ALONE)
    expected = alone(plain)
    plain.close()
    engine = Engine(EngineRole.DECODE)
    runner, greedy = vllm_private.model_runner_of(engine.engine), BatchSettings(policy="greedy", chunk_tokens=32)
    results: dict[str, Any] = {}
    for name in POLICIES:
        settings = BatchSettings(policy=name, chunk_tokens=32, wait_bound_s=0.2, probe_interval_s=0.2, probe_s=0.05)
        results[name] = together(engine, settings, expected)
    if isinstance(runner, SharedPrefixOrder):
        runner.orders_rows = False
        results["unordered"] = together(engine, greedy, expected)
        runner.orders_rows = True
        with mock.patch.object(MultiGroupBlockTable, "swap_row", lambda table, one, other: None):
            results["rows_swapped_without_their_blocks"] = together(engine, greedy, expected)
    engine.close()
    return results
