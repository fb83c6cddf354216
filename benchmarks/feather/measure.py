"""Stop policies on a real engine, open loop: the measurement behind `rachis bench feather`.

    fcfs          vLLM's order of arrival, and its own order of rows in the batch
    fcfs_ordered  the same requests in the same batches, rows of a shared prefix side by side
    greedy, heuristic, bandit, q_learning      the decode scheduler, rows ordered as well

All run in one engine, one after the other, `rounds` times in turn, with the prefixes on the device and the same Poisson
arrivals. What runs when arrivals end is aborted; a request that never began counts with the time it has waited. What a
policy has learned stays with it from round to round. Greedy answers have to agree with those of `fcfs`, token by token,
as far as both were generated: else there are no figures.

`ceiling` is the same load with one group: what batches could yield if everybody shared. `vllm` is a plain engine
without any code of ours, started before. Throughput: decode tokens a second while requests arrive. held: how long the
policy kept a request waiting after its turn; wait: from arrival to the first token. scheduler_cpu_share: what all that
the decode scheduler adds takes of the steps' time.
"""

import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.feather.workload import FeatherWorkload
from benchmarks.measuring_process import Reports, foreign_cpu_s, run_measurement
from cluster_configs.schema import RachisConfig
from cluster_core.clock import monotonic_s
from cluster_core.errors import UnavailableError
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment

FCFS, FCFS_ORDERED, VLLM = "fcfs", "fcfs_ordered", "vllm"
LEARNING = ("bandit", "q_learning")
VARIANTS = (FCFS, FCFS_ORDERED, "greedy", "heuristic", *LEARNING)
_SERIES_S = 0.25
# So many times its seconds a run takes at most.
_MOST_TIMES = 10


@dataclass(slots=True)
class Run:
    """What one policy did with one workload."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    # Between two tokens of a request.
    gaps_s: list[float] = field(default_factory=list)
    # (seconds, tokens) of each step.
    series: list[tuple[float, int]] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)
    admissions: dict[str, int] = field(default_factory=dict)
    decision_s: float = 0.0
    took_s: float = 0.0
    busy_s: float = 0.0
    foreign_cores: float = 0.0

    @property
    def throughput(self) -> float:
        return sum(tokens for _, tokens in self.series) / self.took_s

    @property
    def mean_batch(self) -> float:
        return float(np.mean([tokens for _, tokens in self.series])) if self.series else 0.0


class DecodeEngine:
    """One engine, stepped here. plain: without any code of ours."""

    def __init__(self, config: RachisConfig, *, plain: bool) -> None:
        role = EngineRole.ALONE if plain else EngineRole.DECODE
        settings = EngineSettings(
            config.model,
            config.engine,
            config.handoff,
            role,
            config.streaming,
            tiers=config.tiers,
            decode=config.decode,
        )
        os.environ.update(engine_environment(settings))
        # Imported here because they read the environment.
        from vllm.v1.engine.llm_engine import LLMEngine

        from kv_transfer import vllm_private
        from worker_runtime.vllm_arguments import engine_args

        self._private = vllm_private
        self._engine = LLMEngine.from_engine_args(engine_args(settings))
        self._scheduler = vllm_private.scheduler_of(self._engine)
        self._plain = plain
        self._bound_s = config.decode.wait_bound_s
        # Of the policies that learn, by name and load.
        self._learned: dict[Any, Any] = {}
        self._names = 0
        self.vocabulary_size = config_vocabulary(self._engine)

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def run(self, variant: str, workload: FeatherWorkload) -> Run:
        """One variant under one load; nothing is left in the engine afterwards."""
        self._use("fcfs", ordered=False)
        self._warm_up(workload)
        policy = "fcfs" if variant in (FCFS, FCFS_ORDERED, VLLM) else variant
        self._use(policy, ordered=variant != FCFS)
        batching = None if self._plain else self._scheduler.batching
        key = (variant, replace(workload, seed=0))
        if batching is not None and key in self._learned:
            batching.policy.load(self._learned[key])
        run = self._arrive(workload.arrivals(self.vocabulary_size), workload)
        if batching is not None:
            if variant in LEARNING:
                self._learned[key] = batching.policy.dump()
            run.held_s = list(batching.counters.recently_held_s)
            run.admissions = {reason.value: number for reason, number in batching.counters.admissions.items()}
            run.decision_s = self._scheduler.batch_counters.decision_s
        return run

    def _use(self, policy: str, *, ordered: bool) -> None:
        if self._plain:
            return
        from decode_worker.batch_settings import BatchSettings

        self._scheduler.use_policy(BatchSettings(policy=policy, wait_bound_s=self._bound_s, guard=False))
        self._private.model_runner_of(self._engine).orders_rows = ordered

    def _warm_up(self, workload: FeatherWorkload) -> None:
        """Puts the prefixes on the device."""
        for prefix in workload.prefixes(self.vocabulary_size):
            self._add([*prefix, 0], 1)
            while self._engine.has_unfinished_requests():
                self._engine.step()
        gc.collect()

    def _arrive(self, arrivals: Sequence[tuple[float, list[int]]], workload: FeatherWorkload) -> Run:
        engine, run, added = self._engine, Run(), 0
        seen: dict[int, float] = {}
        numbers: dict[str, int] = {}
        foreign_s, began_s = foreign_cpu_s(), monotonic_s()
        # On a busy machine longer, until some answer has two tokens: of less there are no figures.
        longest_s = _MOST_TIMES * workload.seconds
        while (now_s := monotonic_s() - began_s) < (workload.seconds if run.gaps_s else longest_s):
            while added < len(arrivals) and arrivals[added][0] <= now_s:
                numbers[self._add(arrivals[added][1], workload.decode_tokens)] = added
                added += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, min(arrivals[added][0] if added < len(arrivals) else now_s, now_s + 0.01) - now_s))
                continue
            step_s = monotonic_s()
            outputs = engine.step()
            run.busy_s += monotonic_s() - step_s
            now_s = monotonic_s() - began_s
            run.series.append((now_s, len(outputs)))
            for output in outputs:
                number = numbers[output.request_id]
                if number in seen:
                    run.gaps_s.append(now_s - seen[number])
                else:
                    run.waits_s.append(now_s - arrivals[number][0])
                seen[number] = now_s
                run.tokens[number] = list(output.outputs[0].token_ids)
        run.took_s = monotonic_s() - began_s
        run.foreign_cores = (foreign_cpu_s() - foreign_s) / run.took_s
        run.waits_s += [run.took_s - arrived_s for number, (arrived_s, _) in enumerate(arrivals) if number not in seen]
        engine.abort_request(list(numbers))
        while engine.has_unfinished_requests() or self._scheduler.has_requests():
            engine.step()
        return run

    def _add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        self._names += 1
        name = f"feather-{self._names}"
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name


def config_vocabulary(engine: Any) -> int:
    return int(engine.vllm_config.model_config.get_vocab_size())


async def bench_feather(arguments: dict[str, Any], reports: Reports) -> dict[str, Any]:
    """For `RachisConfig` "config", "places", "variants", "rounds", `FeatherWorkload` "workload", and "sweep": workloads
    by name that are measured as well."""
    config = RachisConfig.model_validate(arguments["config"])
    workload = FeatherWorkload(**arguments["workload"])
    sweep = {name: FeatherWorkload(**each) for name, each in arguments["sweep"].items()}
    variants, rounds = list(arguments["variants"]), int(arguments["rounds"])
    one_group = replace(workload, groups=1, levels=1)
    unshared = replace(workload, groups=0, levels=1, shared_tokens=min(workload.shared_tokens, 512))
    loads = {"main": workload, "one_group": one_group, "no_sharing": unshared, **sweep}
    config = _sized(config, loads.values(), int(arguments["places"]))
    reports.total((1 + len(variants) * len(loads)) * rounds)
    reports.phase("starting a plain engine")
    plain = DecodeEngine(config, plain=True)
    plain_runs = [_measured(plain, VLLM, replace(workload, seed=each), reports) for each in range(rounds)]
    plain.close()
    reports.phase("starting the decode engine")
    engine = DecodeEngine(config, plain=False)
    runs: dict[str, dict[str, list[Run]]] = {load: {name: [] for name in variants} for load in loads}
    for number in range(rounds):
        for load, its in loads.items():
            turn = number % len(variants)
            for name in [*variants[turn:], *variants[:turn]]:
                runs[load][name].append(_measured(engine, name, replace(its, seed=its.seed + number), reports))
            for name in variants:
                require_identical(f"{name} under {load}", runs[load][name][-1], runs[load][FCFS][-1])
    engine.close()
    tables = {load: table(its) for load, its in runs.items()}
    ceiling = max(each["throughput_tok_s"] for each in tables["one_group"].values())
    for figures in tables["main"].values():
        figures["share_of_ceiling"] = round(figures["throughput_tok_s"] / ceiling, 3)
    return {
        "policies": tables["main"],
        "vllm": figures_of(plain_runs),
        "ceiling_tok_s": ceiling,
        "one_group": tables["one_group"],
        "no_sharing": tables["no_sharing"],
        "sweep": {name: {"workload": asdict(sweep[name]), "policies": tables[name]} for name in sweep},
        "workload": asdict(workload) | _described(config, rounds),
        "series": {name: binned(its[0].series, workload.seconds) for name, its in runs["main"].items()},
    }


def _measured(engine: DecodeEngine, variant: str, workload: FeatherWorkload, reports: Reports) -> Run:
    reports.phase(variant)
    run = engine.run(variant, workload)
    reports.done()
    return run


def _sized(config: RachisConfig, loads: Any, places: int) -> RachisConfig:
    """An engine with room for every load, so that nobody is preempted; prefixes stay on the device."""
    blocks = 64 + max(each.blocks(config.engine.block_size_tokens, places) for each in loads)
    engine = config.engine.model_copy(
        update={"kv_blocks": blocks, "max_running_requests": places, "max_batched_tokens": 4096}
    )
    return config.model_copy(
        update={"engine": engine, "tiers": config.tiers.model_copy(update={"host_gib": 0.0, "host_ratio": None})}
    )


def require_identical(name: str, run: Run, reference: Run) -> None:
    """Raises UnavailableError where two answers to one request differ, as far as both go."""
    for number, tokens in run.tokens.items():
        expected = reference.tokens.get(number, [])
        both = min(len(tokens), len(expected))
        if tokens[:both] != expected[:both]:
            raise UnavailableError(f"wrong tokens: request {number} of {name} is not answered as with {FCFS}")


def table(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    found = {name: figures_of(its) for name, its in runs.items()}
    for figures in found.values():
        figures["speedup_vs_fcfs"] = round(figures["throughput_tok_s"] / found[FCFS]["throughput_tok_s"], 3)
    return found


def figures_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians of the rounds."""

    def median(values: Sequence[float], digits: int = 1) -> float:
        return round(float(np.median(values)), digits)

    def quantile_ms(samples: Sequence[Sequence[float]], share: float) -> float:
        return median([float(np.quantile(each, share)) * 1000 if len(each) else 0.0 for each in samples])

    gaps, waits, held = [run.gaps_s for run in runs], [run.waits_s for run in runs], [run.held_s for run in runs]
    return {
        "throughput_tok_s": median([run.throughput for run in runs]),
        "throughput_rounds": [round(run.throughput, 1) for run in runs],
        "tbt_p50_ms": quantile_ms(gaps, 0.5),
        "tbt_p99_ms": quantile_ms(gaps, 0.99),
        "wait_p50_ms": quantile_ms(waits, 0.5),
        "wait_p99_ms": quantile_ms(waits, 0.99),
        "held_p99_ms": quantile_ms(held, 0.99),
        "mean_batch": median([run.mean_batch for run in runs]),
        "scheduler_cpu_share": median([run.decision_s / run.busy_s if run.busy_s else 0.0 for run in runs], 5),
        "admissions": {
            reason: sum(run.admissions.get(reason, 0) for run in runs)
            for reason in sorted({each for run in runs for each in run.admissions})
        },
        "foreign_cores": round(max(run.foreign_cores for run in runs), 2),
    }


def binned(series: Sequence[tuple[float, int]], seconds: float) -> dict[str, list[float]]:
    """Mean batch and decode tokens a second over time, in bins of a quarter of a second."""
    bins = max(1, int(seconds / _SERIES_S))
    sizes: list[list[int]] = [[] for _ in range(bins)]
    for at_s, tokens in series:
        sizes[min(bins - 1, int(at_s / _SERIES_S))].append(tokens)
    return {
        "at_s": [round((number + 1) * _SERIES_S, 2) for number in range(bins)],
        "batch": [round(float(np.mean(each)), 2) if each else 0.0 for each in sizes],
        "throughput_tok_s": [round(sum(each) / _SERIES_S, 1) for each in sizes],
    }


def _described(config: RachisConfig, rounds: int) -> dict[str, Any]:
    engine = config.engine
    return {
        "rounds": rounds,
        "places": engine.max_running_requests,
        "device_blocks": engine.kv_blocks,
        "block_size_tokens": engine.block_size_tokens,
        "model": config.model.served_name,
        "device": engine.device,
        "dtype": engine.dtype,
        "threads": engine.threads,
        "decode": config.decode.model_dump(mode="json"),
    }


if __name__ == "__main__":
    run_measurement(bench_feather)
