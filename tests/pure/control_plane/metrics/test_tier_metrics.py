"""The tiers of workers in Prometheus, asked for at each scrape."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.metrics.tier_metrics import tier_metrics
from control_plane.metrics.worker_metrics import WorkerCollector

REPORT = wire.TierReport(
    prompt_tokens=1000,
    device_hit_tokens=600,
    host_hit_tokens=100,
    device_blocks=10,
    device_capacity_blocks=64,
    host_blocks=20,
    host_capacity_blocks=128,
    copied_out_bytes=4096,
    copied_back_bytes=2048,
    copy_out_s=0.5,
    copy_back_s=0.25,
    refused_offers={"frequency": 3, "host_locked": 0},
    promoted_used_blocks=7,
    promoted_wasted_blocks=2,
    evicted_device_blocks=5,
    evicted_host_blocks=1,
    evicted_device_for_others_blocks=4,
)


def view(worker_id: str, report: wire.TierReport | None) -> admin.WorkerView:
    return admin.WorkerView(registration=wire.WorkerRegistration(worker_id=worker_id), tiers=report)


def samples(views: Sequence[admin.WorkerView]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in tier_metrics(views)
        for sample in metric.samples
    }


def test_every_worker_with_tiers_has_samples_of_its_own() -> None:
    found = samples([view("prefill-0", REPORT), view("prefill-1", wire.TierReport()), view("decode-0", None)])

    assert {labels[1] for labels in found} == {"prefill-0", "prefill-1"}
    assert found["rachis_tier_prompt_tokens_total", "prefill-1"] == 0
    of_one = {(name.removeprefix("rachis_tier_"), *rest): value for (name, worker, *rest), value in found.items()
              if worker == "prefill-0"}  # fmt: skip
    assert of_one == {
        ("prompt_tokens_total",): 1000,
        ("hit_tokens_total", "device"): 600,
        ("hit_tokens_total", "host"): 100,
        ("copied_bytes_total", "out"): 4096,
        ("copied_bytes_total", "back"): 2048,
        ("copy_seconds_total", "out"): 0.5,
        ("copy_seconds_total", "back"): 0.25,
        ("refused_total", "frequency"): 3,
        ("refused_total", "host_locked"): 0,
        ("promotions_total", "used"): 7,
        ("promotions_total", "wasted"): 2,
        ("evicted_total", "device"): 5,
        ("evicted_total", "host"): 1,
        ("evicted_for_others_total", "device"): 4,
        ("evicted_for_others_total", "host"): 0,
        ("blocks", "device"): 10,
        ("blocks", "host"): 20,
        ("capacity_blocks", "device"): 64,
        ("capacity_blocks", "host"): 128,
    }


def test_a_router_that_hangs_costs_a_scrape_a_bounded_time() -> None:
    class NoWorkers:
        async def gather(self, timeout_s: float) -> Sequence[admin.WorkerView]:
            return ()

    views: Any = NoWorkers()
    loop = asyncio.new_event_loop()

    assert list(WorkerCollector(views, loop, timeout_s=0.001).collect()) == []

    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
