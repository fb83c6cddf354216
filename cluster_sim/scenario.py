"""Scenario files: YAML that says which cluster gets which requests, in variants to compare.

`variants` are names with what is different in them; without any there is one, as the rest says. Paths are relative to
the file. `read` and `check` refuse what cannot be before anything runs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from cluster_configs.preemption_costs import default_model
from cluster_configs.schema import DecodeSection, PlacementSection, Section, StreamingSection, TiersSection
from cluster_core.errors import ConfigError
from cluster_sim.costs import catalog
from cluster_sim.costs.decode_steps import decode_costs
from cluster_sim.costs.step_work import CostModel
from cluster_sim.dispatch_settings import DispatchSettings
from cluster_sim.engines.engine import SimEngine
from cluster_sim.engines.light_chunk_bound import LEAST_TOKENS, ChunkBound
from cluster_sim.engines.light_engine import LightEngine, LightEngineSettings
from cluster_sim.worker import PoolSettings
from cluster_sim.workloads.opening import open_workload
from cluster_sim.workloads.requests import Workload
from cluster_sim.workloads.section import WorkloadSection
from cluster_sim.world import Fault, World, WorldSettings
from control_plane.placement import by_objective, deflection, length_aware
from control_plane.placement.by_objective import Objectives
from control_plane.placement.objective_placer import BothRules
from decode_worker.batch_settings import BatchSettings
from kv_transfer.tiers.settings import TierSettings
from kv_transfer.tiers.tier_terms import TierRules

_MOST_WORKERS = 4096
# Hotness is remembered for so many times the blocks that a worker can hold.
_REMEMBERED = 4


class PoolSection(Section):
    """One pool of workers."""

    workers: int = Field(1, ge=0, le=_MOST_WORKERS)
    cost_model: str | None = Field(None, description="Instead of the scenario's.")
    max_running_requests: int = Field(256, ge=1, le=100_000, description="As vLLM's `max_num_seqs`.")
    max_batched_tokens: int = Field(8192, ge=1, le=1_000_000, description="As vLLM's `max_num_batched_tokens`.")
    device_tokens: int | None = Field(None, ge=1, description="KV that fits on the device; null: as the model says.")
    host_tokens: int | None = Field(None, ge=0, description="KV in host memory; null: as the model says.")
    chunk_bound: float = Field(
        0.0, ge=0, le=1, description="Of `light`: share of `slo.tpot_ms` that a step may last which decodes; 0: any."
    )
    pulled_first: bool = Field(False, description="Of `light`: requests whose KV has been pulled come before prompts.")
    step_start_ms: float = Field(
        0.0, ge=0, description="Of `vllm`: what a step takes more that goes on with no request of the step before."
    )


class PoolsSection(Section):
    """`prefill.workers: 0` makes it an aggregated service, whose workers do both."""

    prefill: PoolSection = PoolSection()
    decode: PoolSection = PoolSection()


class BothSection(Section):
    """Workers of the decode pool that do both, placed on by the objectives of `slo`; without prefill workers."""

    prefill_heavy: float | None = Field(
        None, ge=0, le=1, description="Share of the workers that decode little, rounded down; null: as many as needed."
    )
    refuses: bool = Field(True, description="Requests that no choice is expected to keep TTFT for.")
    rule: Literal["objectives", "deflection", "length_aware"] = Field(
        "objectives",
        description="Or prefill deflection (arXiv:2607.02043) or TaiChi's length-aware prefill (arXiv:2508.01989) as "
        "published; the prefill-heavy are their prefill nodes.",
    )


class SloSection(Section):
    """What a request has to keep to count as goodput; 0: no objective."""

    ttft_ms: float = Field(0.0, ge=0)
    tpot_ms: float = Field(0.0, ge=0, description="Mean time between the tokens of one request, after its first.")


class FaultSection(Section):
    """Something that goes wrong at a time, on one worker."""

    at_s: float = Field(ge=0)
    kind: Literal["kill", "slow", "link"]
    worker: str = Field(description="Such as `prefill-0000`.")
    for_s: float = Field(30.0, gt=0)
    factor: float = Field(10.0, gt=0, description="How many times slower steps or links are.")


class RouterSection(Section):
    hop_ms: float = Field(0.5, ge=0, description="Of one message between router and worker.")
    pull_ms: float = Field(0.0, ge=0, description="What connector and engine take for a pull, beside the transfer.")
    prefill_attempts: int = Field(2, ge=1, le=10)
    worker_wait_s: float = Field(30.0, gt=0)
    request_timeout_s: float = Field(600.0, gt=0)
    handoff_deadline_s: float = Field(15.0, gt=0, description="A pull that has not ended by then is computed again.")
    event_delay_ms: float = Field(100.0, ge=0, description="From a change in a worker's caches to the index.")
    report_s: float = Field(2.0, ge=0.05, description="How often workers renew their registrations.")
    worker_lease_s: float = Field(5.0, gt=0)


class Scenario(Section):
    """One variant, whole."""

    name: str = Field("scenario", min_length=1, max_length=100)
    seed: int = Field(0, ge=0)
    cost_model: str = Field("h100-llama-3.1-8b", description="A name, or a JSON file; see `cluster_sim.costs`.")
    engine: Literal["light", "vllm"] = Field("light", description="`vllm`: vLLM's own scheduler classes in the loop.")
    pools: PoolsSection = PoolsSection()
    workload: WorkloadSection = WorkloadSection(requests_per_s=1.0)
    placement: PlacementSection = PlacementSection()
    tiers: TiersSection = TiersSection()
    streaming: StreamingSection = StreamingSection()
    decode: DecodeSection = DecodeSection()
    router: RouterSection = RouterSection()
    slo: SloSection = SloSection()
    both: BothSection | None = Field(None, description="Placement by the objectives; null: as `placement` says.")
    warm_up_s: float = Field(0.0, ge=0, description="Who arrives before is served, and not measured.")
    faults: tuple[FaultSection, ...] = ()


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """text: as it was read."""

    name: str
    text: str
    variants: tuple[Scenario, ...]


def read(path: Path, overrides: Mapping[str, Any] | None = None) -> ScenarioFile:
    """overrides: values of all variants, by dotted key. Raises ConfigError naming file, key and limit."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", field=str(path)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not valid YAML: {error}", field=str(path)) from None
    if not isinstance(tree, dict):
        raise ConfigError("must be a table of sections", field=str(path))
    changes = tree.pop("variants", None) or [{}]
    if not isinstance(changes, list) or not all(isinstance(each, dict) for each in changes):
        raise ConfigError("must be a list of tables", field=f"{path}: variants")
    title = str(tree.get("name", path.stem))
    variants = []
    for change in changes:
        whole = _merged(_merged(tree, change), _tree(overrides or {}))
        whole["name"] = change.get("name", title)
        variants.append(_checked(whole, path))
    names = [each.name for each in variants]
    if len(set(names)) < len(names):
        raise ConfigError("must have names of their own", field=f"{path}: variants")
    return ScenarioFile(title, text, tuple(variants))


def check(scenarios: ScenarioFile) -> None:
    """Whatever can be refused before anything runs. Raises InvalidInputError or ConfigError."""
    for scenario in scenarios.variants:
        _settings(scenario, workload_of(scenario).block_tokens)


def make_world(scenario: Scenario, *, block_tokens: int, objectives: Sequence[tuple[float, float]] = ()) -> World:
    """objectives: further pairs of TTFT and TPOT in seconds, of which attainment is counted as well.

    Raises InvalidInputError or ConfigError for cost models, faults and objectives that cannot be.
    """
    return World(scenario.name, replace(_settings(scenario, block_tokens), objectives=objectives))


def workload_of(scenario: Scenario) -> Workload:
    return open_workload(scenario.workload, scenario.seed)


def _settings(scenario: Scenario, block_tokens: int) -> WorldSettings:
    pools = {name: _pool(scenario, name, getattr(scenario.pools, name), block_tokens) for name in ("prefill", "decode")}
    known = {f"{name}-{number:04}" for name, pool in pools.items() for number in range(pool.workers)}
    for fault in scenario.faults:
        if fault.worker not in known:
            raise ConfigError(f"there is no worker {fault.worker}; the first is decode-0000", field="faults.worker")
    router = scenario.router
    return WorldSettings(
        pools=pools,
        block_tokens=block_tokens,
        placement=scenario.placement,
        dispatch=DispatchSettings(
            router.hop_ms / 1000,
            router.prefill_attempts,
            router.worker_wait_s,
            router.request_timeout_s,
            router.handoff_deadline_s,
            scenario.warm_up_s,
        ),
        faults=[Fault(**fault.model_dump()) for fault in scenario.faults],
        event_delay_s=router.event_delay_ms / 1000,
        pull_s=router.pull_ms / 1000,
        report_s=router.report_s,
        lease_s=router.worker_lease_s,
        slo_ttft_s=scenario.slo.ttft_ms / 1000,
        slo_tpot_s=scenario.slo.tpot_ms / 1000,
        both=_both(scenario),
    )


_CHOICES = {
    "objectives": by_objective.choices, "deflection": deflection.choices, "length_aware": length_aware.choices
}  # fmt: skip


def _both(scenario: Scenario) -> BothRules | None:
    section, slo, decode = scenario.both, scenario.slo, scenario.pools.decode
    if section is None:
        return None
    if scenario.pools.prefill.workers or not (slo.ttft_ms and slo.tpot_ms):
        raise ConfigError("needs slo.ttft_ms and slo.tpot_ms, and pools.prefill.workers of 0", field="both")
    objectives = Objectives(slo.ttft_ms / 1000, slo.tpot_ms / 1000, decode.chunk_bound or 1.0)
    costs = decode_costs(catalog.load(decode.cost_model or scenario.cost_model), decode.max_running_requests)
    choices = _CHOICES[section.rule]
    return BothRules(
        objectives, costs, section.prefill_heavy, section.refuses, choices=choices, bounds_are_exact=True,
        least_tokens=LEAST_TOKENS, step_tokens=decode.max_batched_tokens,
    )  # fmt: skip


def _pool(scenario: Scenario, name: str, section: PoolSection, block_tokens: int) -> PoolSettings:
    model = catalog.load(section.cost_model or scenario.cost_model)
    device_tokens = section.device_tokens or model.device_tokens
    host_tokens = model.host_tokens if section.host_tokens is None else section.host_tokens
    device_blocks, host_blocks = device_tokens // block_tokens, host_tokens // block_tokens
    if not device_blocks:
        raise ConfigError(f"must hold a block of {block_tokens} tokens", field=f"pools.{name}.device_tokens")
    tiers = _tier_settings(scenario.tiers, device_blocks + host_blocks)
    make: Callable[[], SimEngine]
    if scenario.engine == "light":
        settings = LightEngineSettings(
            block_tokens, device_blocks, host_blocks, section.max_running_requests, section.max_batched_tokens, tiers,
            _chunk_bound(scenario, section), section.pulled_first,
        )  # fmt: skip
        make = partial(LightEngine, model, settings)
    else:
        make = _vllm_engine(scenario, name, model, tiers, (block_tokens, device_tokens, host_tokens))
    return PoolSettings(section.workers, model, make, section.max_running_requests)


def _chunk_bound(scenario: Scenario, section: PoolSection) -> ChunkBound | None:
    if not section.chunk_bound:
        return None
    if not scenario.slo.tpot_ms:
        raise ConfigError("needs slo.tpot_ms", field="pools.chunk_bound")
    ttft_s = scenario.slo.ttft_ms / 1000 or math.inf
    return ChunkBound(scenario.slo.tpot_ms / 1000, ttft_s, section.chunk_bound)


def _tier_settings(section: TiersSection, blocks: int) -> TierSettings:
    names = {each.name for each in (*fields(TierSettings), *fields(TierRules))}
    given = {name: value for name, value in section.model_dump().items() if name in names}
    fewest = 1 << (_REMEMBERED * max(256, blocks)).bit_length()
    return TierSettings.of({**given, "filter_entries": min(section.filter_entries, fewest)})


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        known = merged.get(key)
        merged[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def _tree(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"is no section that could have {last}", field=section)
        place[last] = value
    return tree


def _checked(tree: dict[str, Any], path: Path) -> Scenario:
    try:
        scenario = Scenario.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{first['msg']}, got {first['input']!r}", field=f"{path}: {key}") from None
    if scenario.placement.policy == "objectives":
        raise ConfigError("is `both` in a scenario, with its objectives in `slo`", field=f"{path}: placement.policy")
    if scenario.pools.decode.workers < 1:
        raise ConfigError("must be at least 1: all requests decode", field=f"{path}: pools.decode.workers")
    file = scenario.workload.file
    if file is not None and not file.is_absolute():
        workload = scenario.workload.model_copy(update={"file": path.parent / file})
        scenario = scenario.model_copy(update={"workload": workload})
    return scenario


def _vllm_engine(
    scenario: Scenario, name: str, model: CostModel, tiers: TierSettings, sizes: tuple[int, int, int]
) -> Callable[[], SimEngine]:
    """vLLM is imported here because nothing else needs it. sizes: tokens of a block, of the device, of host memory."""
    from cluster_sim.engines.vllm_engine import VllmSimEngine
    from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings

    section, streaming = getattr(scenario.pools, name), scenario.streaming
    block_tokens, device_tokens, host_tokens = sizes
    settings = VllmEngineSettings(
        kind=SchedulerKind.STREAMING if name == "prefill" else SchedulerKind.DECODE,
        block_tokens=block_tokens,
        device_blocks=device_tokens // block_tokens,
        host_blocks=host_tokens // block_tokens,
        max_running_requests=section.max_running_requests,
        max_batched_tokens=section.max_batched_tokens,
        step_start_s=section.step_start_ms / 1000,
        policy=streaming.policy,
        preemption=streaming.preemption,
        starvation_s=streaming.starvation_s,
        preemption_costs=default_model("cuda"),
        decode=BatchSettings.of(scenario.decode.model_dump()),
        tiers=tiers,
    )
    return partial(VllmSimEngine, model, settings)
