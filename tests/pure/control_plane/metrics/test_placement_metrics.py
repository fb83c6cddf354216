"""The index and placement in Prometheus, and the alarms on them."""

import asyncio
import re
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.core import Metric
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.ids import WorkerId
from control_plane.fleet.candidates import Candidates, candidates, fixed_columns
from control_plane.fleet.loads import Load
from control_plane.metrics.placement_metrics import PlacementCollector, index_metrics, placement_metrics
from control_plane.model.worker_snapshot import Pool, WorkerSnapshot
from control_plane.placement.counts import PlacementCounts
from control_plane.placement.decision import Choice
from control_plane.placement.policy import Decision, PlacementPolicy, Question
from control_plane.placement.view import unknown_prompt
from tests import ROOT
from tests.fakes.cluster import DECODE, PREFILL

ALERTS = ROOT / "cluster_configs" / "alerts" / "rachis-index.yaml"
STATUS = admin.GetIndexStatusResponse(
    entries=1000,
    capacity_entries=4096,
    bytes=65_536,
    dropped=7,
    connected=True,
    staleness_s=0.25,
    stale=True,
    workers=[
        admin.WorkerFeedStatus(worker_id="decode-0", generation=1, sequence=9, lag_batches=3, in_sync=False),
        admin.WorkerFeedStatus(worker_id="prefill-0", generation=2, sequence=4, in_sync=True, silent=True),
    ],
    batches=13,
    keys=400,
    duplicates=1,
    gaps=2,
    resyncs=5,
    damaged=6,
    load_only_decisions=8,
    disaggregation={"short_remainder": 11, "remote_sooner": 22},
)


def counted() -> PlacementCounts:
    counts = PlacementCounts()
    for row in (0, 1, -1):
        counts.placed(decided(PREFILL, "hotness", row))
    counts.placed(decided(DECODE, "least_loaded", 1, is_stale=True))
    return counts


def decided(pool: Pool, policy: str, winner: int, *, is_stale: bool = False) -> Choice:
    """A prompt of 100 tokens, of which the second of two workers has 64 on the device and 32 in host memory."""
    view = unknown_prompt(pool, two_workers(), is_stale=is_stale)
    view.device[1], view.host[1] = 64, 32
    decision = Decision(view, np.ones(2, dtype=np.bool_), {}, np.zeros(2), winner)
    return Choice(PlacementPolicy((), name=policy), Question(100, 8), decision)


def two_workers() -> Candidates:
    workers = [WorkerSnapshot(WorkerId(f"w-{number}"), 1, PREFILL, "") for number in range(2)]
    records = [wire.WorkerRegistration(worker_id=each.worker_id) for each in workers]
    return candidates(fixed_columns(workers, records, records), np.zeros((len(Load), 2)), 0.0)


def samples(metrics: list[Metric]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("rachis_"), *sample.labels.values()): sample.value
        for metric in metrics
        for sample in metric.samples
    }


def test_the_state_of_the_index_has_samples_and_each_worker_its_own() -> None:
    assert samples(index_metrics(STATUS, {"prefill-0": 12})) == {
        ("index_entries",): 1000,
        ("index_capacity_entries",): 4096,
        ("index_bytes",): 65_536,
        ("index_dropped_total",): 7,
        ("index_connected",): 1,
        ("index_staleness_seconds",): 0.25,
        ("index_stale",): 1,
        ("index_lag_batches", "decode-0"): 3,
        ("index_lag_batches", "prefill-0"): 0,
        ("index_in_sync", "decode-0"): 0,
        ("index_in_sync", "prefill-0"): 1,
        ("index_silent", "decode-0"): 0,
        ("index_silent", "prefill-0"): 1,
        ("index_batches_total",): 13,
        ("index_keys_total",): 400,
        ("index_duplicates_total",): 1,
        ("index_gaps_total",): 2,
        ("index_resyncs_total",): 5,
        ("index_damaged_total",): 6,
        ("index_untrue_claims", "prefill-0"): 12,
    }


def test_before_any_check_nothing_is_said_about_untrue_claims() -> None:
    assert not [name for name, *_ in samples(index_metrics(STATUS, None)) if "untrue" in name]


def test_placements_count_with_what_the_chosen_worker_had_and_only_where_there_was_one() -> None:
    assert samples(placement_metrics(STATUS, counted())) == {
        ("placement_decisions_total", "prefill", "hotness"): 2,
        ("placement_decisions_total", "decode", "least_loaded"): 1,
        ("placement_load_only_total",): 8,
        ("placement_prompt_tokens_total", "prefill"): 200,
        ("placement_prompt_tokens_total", "decode"): 100,
        ("placement_hit_tokens_total", "prefill", "device"): 64,
        ("placement_hit_tokens_total", "prefill", "host"): 32,
        ("placement_hit_tokens_total", "decode", "device"): 64,
        ("placement_hit_tokens_total", "decode", "host"): 32,
        ("disaggregation_decisions_total", "short_remainder"): 11,
        ("disaggregation_decisions_total", "remote_sooner"): 22,
    }


async def test_a_router_that_is_busy_has_no_samples_instead_of_a_scrape_that_hangs() -> None:
    unused: Any = None
    loop = asyncio.get_running_loop()
    collector = PlacementCollector(lambda: STATUS, unused, unused, dict, loop, timeout_s=0.01)

    # On the loop's own thread, which therefore cannot answer.
    assert list(collector.collect()) == []


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_every_alarm_is_on_metrics_that_exist_with_the_labels_that_they_have() -> None:
    metrics = [*index_metrics(STATUS, {"prefill-0": 1}), *placement_metrics(STATUS, counted())]
    labels = {sample.name: set(sample.labels) for metric in metrics for sample in metric.samples}

    for rule in alert_rules():
        named = set(re.findall(r"rachis_\w+", rule["expr"] + rule["annotations"]["description"]))
        assert named, rule["alert"]
        assert named <= set(labels), rule["alert"]
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) - {"instance"}
        of_expression = set.union(*(labels[name] for name in re.findall(r"rachis_\w+", rule["expr"])))
        assert used <= of_expression, rule["alert"]


@pytest.mark.parametrize("kind", ["stale", "silent", "in_sync", "untrue_claims", "damaged"])
def test_what_makes_the_index_unbelievable_has_an_alarm(kind: str) -> None:
    rules = [rule for rule in alert_rules() if f"rachis_index_{kind}" in rule["expr"]]

    assert rules
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)


def test_no_label_names_a_prefix_a_request_or_a_tenant() -> None:
    metrics = [*index_metrics(STATUS, {"prefill-0": 1}), *placement_metrics(STATUS, counted())]

    labels = {label for metric in metrics for sample in metric.samples for label in sample.labels}
    assert labels == {"worker", "pool", "policy", "tier", "reason"}
