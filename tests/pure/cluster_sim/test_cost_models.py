"""Cost models: every shipped figure has a source, what they come to lies near public ballparks, bad files are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster_configs.preemption_costs import LatencyCurve
from cluster_core.errors import InvalidInputError
from cluster_sim.costs import catalog
from cluster_sim.costs.cost_files import FOLDER
from cluster_sim.costs.measured import DecodeStep, MeasuredDecode, MeasuredPrefill
from cluster_sim.costs.step_work import CostModel, StepWork, prefill_work
from tests.planting import planted

# Tokens/s of 4 prompts of 2,048 tokens, ms of a decode step of 1 and of 64 requests with 2,048 tokens each, KV tokens;
# each from and to: what is publicly reported of vLLM, see cost_models/README.md, and wide where little is.
BALLPARKS: dict[str, tuple[tuple[float, float], ...]] = {
    "h200-llama-3.1-8b": ((25_000, 45_000), (4, 6.5), (7, 14), (800_000, 960_000)),
    "h100-llama-3.1-8b": ((25_000, 45_000), (5.5, 8), (9, 18), (400_000, 480_000)),
    "a100-llama-3.1-8b": ((9_000, 16_000), (9, 13), (15, 28), (400_000, 480_000)),
    "a40-llama-3.1-8b": ((4_000, 8_000), (25, 33), (45, 75), (150_000, 215_000)),
    "h100-llama-3.1-70b": ((8_000, 16_000), (13, 21), (16, 30), (400_000, 560_000)),
    "a100-llama-3.1-70b": ((3_500, 6_500), (20, 32), (26, 45), (400_000, 560_000)),
}


def decode(requests: int, context: int = 2048, distinct: float = 1.0) -> StepWork:
    tokens = requests * context
    return StepWork(decode_requests=requests, context_tokens=tokens, distinct_tokens=tokens * distinct)


@pytest.fixture(params=catalog.names())
def model(request: pytest.FixtureRequest) -> CostModel:
    return catalog.load(request.param)


def test_every_number_that_comes_with_the_package_says_unit_and_source() -> None:
    def leaves(content: dict[str, Any]) -> list[dict[str, Any]]:
        tables = [each for each in content.values() if isinstance(each, dict)]
        return [content] if "value" in content else [leaf for each in tables for leaf in leaves(each)]

    files = [*FOLDER.glob("*.json"), *FOLDER.glob("*/*.json")]
    numbers = [leaf for file in files for leaf in leaves(json.loads(file.read_text()))]
    assert len(numbers) > 150
    assert all(set(each) == {"value", "unit", "source"} and len(each["source"]) > 8 for each in numbers)


def test_more_work_never_takes_less_time(model: CostModel) -> None:
    prompts = [model.step_s(prefill_work([(0, tokens)])) for tokens in (1, 16, 256, 2048, 8192, 16_384)]
    behind = [model.step_s(prefill_work([(before, 512)])) for before in (0, 512, 8192, 65_536)]
    batches = [model.step_s(decode(requests)) for requests in (1, 2, 8, 64, 256)]
    shared = [model.step_s(decode(64, distinct=share)) for share in (1 / 64, 0.1, 0.5, 1.0)]
    for each in (prompts, behind, batches, shared):
        assert each == sorted(each)
        assert 0 < each[0] < each[-1]
    mixed = StepWork(prefill_tokens=512, prefill_pairs=512 * 256, decode_requests=8, context_tokens=1e4)
    assert model.step_s(mixed) > max(model.step_s(prefill_work([(0, 512)])), model.step_s(decode(8, 1250, 0.0)))


def test_step_is_linear_in_context_for_a_fixed_batch(model: CostModel) -> None:
    low, high = decode(32, 1000, 0.25), decode(32, 9000, 0.75)
    middle = StepWork(
        decode_requests=32,
        context_tokens=(low.context_tokens + high.context_tokens) / 2,
        distinct_tokens=(low.distinct_tokens + high.distinct_tokens) / 2,
    )
    assert model.step_s(middle) == pytest.approx((model.step_s(low) + model.step_s(high)) / 2, rel=1e-9)


def test_copies_and_sizes_are_what_the_model_says(model: CostModel) -> None:
    assert model.load_s(2000) == pytest.approx(2 * model.load_s(1000))
    assert model.device_tokens > 8192
    assert 0.1 < model.gpu_dollars_per_hour < 10
    if "8b" in model.name:
        assert model.kv_bytes_per_token == 131_072
    if "70b" in model.name:
        assert model.kv_bytes_per_token == 327_680


@pytest.mark.parametrize("name", BALLPARKS)
def test_figures_lie_in_public_ballparks(name: str) -> None:
    model = catalog.load(name)
    found = (
        8192 / model.step_s(prefill_work([(0, 2048)] * 4)),
        model.step_s(decode(1)) * 1000,
        model.step_s(decode(64)) * 1000,
        model.device_tokens,
    )
    for value, (least, most) in zip(found, BALLPARKS[name], strict=True):
        assert least <= value <= most


def test_two_gpus_are_faster_than_one_but_not_twice_as_fast() -> None:
    one, two = catalog.load("h200-llama-3.1-8b"), catalog.load("h200x2-llama-3.1-8b")
    work = prefill_work([(0, 8192)])
    assert 1.5 < one.step_s(work) / two.step_s(work) < 2
    assert 1.1 < one.step_s(decode(1)) / two.step_s(decode(1)) < 2


def test_a_shared_prefix_is_cheaper_where_the_cache_is_larger() -> None:
    def gain(name: str) -> float:
        model = catalog.load(name)
        return model.step_s(decode(64)) / model.step_s(decode(64, distinct=1 / 64))

    assert gain("rtx6000ada-llama-3-8b") > gain("a40-llama-3.1-8b") > 1


# Files.


def roofline(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "h100-llama-3.1-8b.json").read_text())
    return {**content, **changes}


def number(value: Any, unit: str, source: str = "a test") -> dict[str, Any]:
    return {"value": value, "unit": unit, "source": source}


def gpu_with(**changes: Any) -> dict[str, Any]:
    return {"like": "h100", **changes}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("nothing", ""),
        ([1], ""),
        ({"kind": "guess"}, ": kind"),
        (roofline(kind=["roofline"]), ": kind"),
        (roofline(gpu="h10"), ": gpu.like"),
        (roofline(gpu=3), ": gpu"),
        (roofline(gpu=gpu_with(flops=number(1, "FLOP/s"))), ": gpu.flops"),
        (roofline(gpu=gpu_with(flops_per_s=1e12)), ": gpu.flops_per_s"),
        (roofline(gpu=gpu_with(flops_per_s=number(1e12, "TFLOP/s"))), ": gpu.flops_per_s.unit"),
        (roofline(gpu=gpu_with(flops_per_s=number(1e12, "FLOP/s", " "))), ": gpu.flops_per_s.source"),
        (roofline(gpu=gpu_with(flops_per_s=number(0, "FLOP/s"))), ": gpu.flops_per_s.value"),
        (roofline(gpu=gpu_with(flops_per_s=number(True, "FLOP/s"))), ": gpu.flops_per_s.value"),
        (roofline(gpu=gpu_with(flops_per_s=number("1", "FLOP/s"))), ": gpu.flops_per_s.value"),
        (roofline(gpu=gpu_with(dense_efficiency=number(1.1, "share"))), ": gpu.dense_efficiency.value"),
        (roofline(gpu={"flops_per_s": number(1e12, "FLOP/s")}), ": gpu.memory_bytes"),
        (roofline(model={"like": "llama-3.1-8b", "layers": number(1.5, "count")}), ": model.layers.value"),
        (roofline(model={"like": "llama-3.1-8b", "parameters": number(1e6, "count")}), ": model.parameters.value"),
        (roofline(tensor_parallel=number(3, "GPUs")), ": tensor_parallel.value"),
        (roofline(model="llama-3.1-70b"), ": tensor_parallel"),
        (roofline(extra=1), ": extra"),
    ],
)
def test_malformed_files_are_refused_with_file_and_key(tmp_path: Path, content: Any, field: str) -> None:
    file = tmp_path / "model.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidInputError) as refused:
        catalog.load(str(file))
    assert refused.value.field == f"{file}{field}"


def test_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(InvalidInputError, match=r"h100-llama-3\.1-8b"):
        catalog.load("h100-llama-3-8b")


def test_own_file_may_change_one_number_of_a_shipped_part(tmp_path: Path) -> None:
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(roofline(gpu=gpu_with(memory_bytes_per_s=number(1.675e12, "bytes/s")))))
    slow, fast = catalog.load(str(file)), catalog.load("h100-llama-3.1-8b")
    assert slow.name == "slow"
    assert slow.step_s(decode(1)) > 1.7 * fast.step_s(decode(1))
    assert slow.device_tokens == fast.device_tokens


# Measured.

PROFILE = {
    "recomputation_latencies": {"16": [2.0], "256": [6.0], "1024": [25.0]},
    "swap_out_latency": {"16": [0.5]},
    "swap_in_latency": {"16": [0.25]},
}


def point(batch: int, total: float, distinct: float, step_ms: float) -> dict[str, float]:
    return {"batch": batch, "total_tokens": total, "distinct_tokens": distinct, "step_ms": step_ms}


DECODE = {
    "kv_bytes_per_token": 4096,
    "points": [
        point(1, 1000, 1000, 2.0),
        point(1, 2000, 2000, 3.0),
        point(8, 8000, 1000, 4.0),
        point(8, 8000, 8000, 8.0),
    ],
}


def measured(**changes: Any) -> dict[str, Any]:
    numbers = {
        "gpus": number(1, "GPUs"),
        "dollars_per_hour": number(0, "$/h"),
        "device_tokens": number(32_768, "tokens"),
        "host_tokens": number(0, "tokens"),
        "network_bytes_per_s": number(1e9, "bytes/s"),
        "network_latency_s": number(0.001, "s"),
    }
    return {"kind": "measured", "profile": PROFILE, "decode": DECODE, **numbers, **changes}


def test_measured_model_goes_through_its_points(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    file = tmp_path / "here.json"
    file.write_text(json.dumps(measured(profile="profile.json")))
    model = catalog.load(str(file))
    for tokens, latency_ms in ((16, 2.0), (256, 6.0), (1024, 25.0)):
        assert model.step_s(prefill_work([(0, tokens)])) == pytest.approx(latency_ms / 1000)
    for batch, total, distinct, step_ms in ((1, 1000, 1000, 2.0), (8, 8000, 1000, 4.0), (8, 8000, 8000, 8.0)):
        work = StepWork(decode_requests=batch, context_tokens=total, distinct_tokens=distinct)
        assert model.step_s(work) == pytest.approx(step_ms / 1000, rel=0.02)
    assert (model.load_s(16), model.store_s(16)) == pytest.approx((0.00025, 0.0005))
    assert (model.gpus, model.kv_bytes_per_token, model.device_tokens) == (1, 4096, 32_768)


def test_measured_prefill_behind_cached_tokens_costs_their_pairs_only() -> None:
    prefill = MeasuredPrefill(LatencyCurve({n: ((1 + 0.01 * n + 1e-5 * n * n / 2),) for n in (16, 128, 1024, 4096)}))
    alone, behind = prefill.seconds(128, 128 * 64), prefill.seconds(128, 128 * (1024 + 64))
    assert behind - alone == pytest.approx(1e-8 * 128 * 1024, rel=0.01)
    assert 0.001 < prefill.seconds(1, 0.5) < prefill.seconds(16, 128)


def test_measured_decode_between_batches_lies_between_them_and_goes_on_beyond() -> None:
    steps = [
        DecodeStep(b, t, d, 0.001 * b + 1e-7 * t) for b in (1, 8, 32) for t, d in ((1e3, 1e3), (9e3, 1e3), (9e3, 9e3))
    ]
    measured = MeasuredDecode(steps)
    for batch in (1, 4, 8, 20, 32, 64):
        assert measured.seconds(batch, 5000, 3000) == pytest.approx(0.001 * batch + 5e-4, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"profile": {}}, ": recomputation_latencies"),
        ({"profile": 1}, ": profile"),
        ({"profile": {**PROFILE, "swap_in_latency": {"x": [1]}}}, ": swap_in_latency.x"),
        ({"decode": {"points": DECODE["points"]}}, ": kv_bytes_per_token"),
        ({"decode": {**DECODE, "points": []}}, ": points"),
        ({"decode": {**DECODE, "points": [point(0, 1, 1, 1)]}}, ": points[0].batch"),
        ({"decode": {**DECODE, "points": [point(1, 1, 1, -1)]}}, ": points[0].step_ms"),
        ({"host_tokens": number(-1, "tokens")}, ": host_tokens.value"),
        ({"gpus": None}, ": gpus"),
    ],
)
def test_malformed_measurements_are_refused_with_file_and_key(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    file = tmp_path / "here.json"
    file.write_text(json.dumps(measured(**changes)))
    with pytest.raises(InvalidInputError) as refused:
        catalog.load(str(file))
    assert refused.value.field == f"{file}{field}"


def test_linearity_check_notices_a_bent_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    model = catalog.load("h100-llama-3.1-8b")
    straight: Callable[[StepWork], float] = type(model).step_s.__get__(model)
    planted(monkeypatch, type(model), "step_s", lambda self, work: straight(work) + 1e-12 * work.context_tokens**2)
    with pytest.raises(AssertionError):
        test_step_is_linear_in_context_for_a_fixed_batch(model)
