"""What is wrong now, under the names, severities and runbooks of the alerts for Prometheus."""

from collections.abc import Callable

import pytest
import yaml
from rachis.v1 import admin_pb2 as admin

from control_plane.overview.alerts import LOOKS, Sight, alerts_of
from control_plane.overview.rows import pool_sums, worker_rows
from tests import ROOT
from tests.pure.control_plane.overview.test_rows import DECODE, PREFILL, view


def sight(change: Callable[[Sight], object] = lambda _: None) -> Sight:
    """Of a service that is well: a worker in each pool."""
    views = [view("decode-0"), view("prefill-0", PREFILL)]
    statuses = [admin.PoolStatus(pool=pool, desired_workers=1, minimum_workers=1) for pool in (PREFILL, DECODE)]
    overview = admin.GetOverviewResponse(
        router=admin.GetRouterStatusResponse(registry_connected=True),
        ttft=admin.TimesOverview(requests=100, p90_s=1.0, objective_s=5.0),
        max_queued_requests=8,
    )
    seen = Sight(overview, worker_rows(views), views, admin.GetIndexStatusResponse(connected=True))
    overview.pools.extend(pool_sums([PREFILL, DECODE], seen.rows, statuses))
    change(seen)
    return seen


def told(seen: Sight) -> list[tuple[str, str]]:
    return [(alert.name, alert.subject) for alert in alerts_of(seen)]


def test_a_service_that_is_well_has_no_alert() -> None:
    assert told(sight()) == []


PLANTED: dict[str, tuple[str, Callable[[Sight], object]]] = {
    "RachisRegistryUnreachable": ("redis", lambda seen: seen.overview.router.ClearField("registry_connected")),
    "RachisPoolBelowMinimum": ("decode", lambda seen: seen.overview.pools[1].workers.clear()),
    "RachisRouterOverloaded": ("router", lambda seen: setattr(seen.overview.router, "queued_requests", 8)),
    "RachisPoisonedRequest": ("router", lambda seen: setattr(seen.overview.router, "poisoned_requests", 1)),
    "RachisWorkerHangs": ("decode-0", lambda seen: setattr(seen.views[0].load, "stalled_s", 9.0)),
    "RachisWorkerLost": ("decode-0", lambda seen: setattr(seen.views[0], "suspect", True)),
    "RachisVersionSkew": ("decode-0", lambda seen: setattr(seen.views[0], "version_skew", "vLLM 1 and 2")),
    "RachisBlocksQuarantined": ("decode-0", lambda seen: setattr(seen.views[0].load, "quarantined_blocks", 3)),
    "RachisClockSkew": ("decode-0", lambda seen: setattr(seen.views[0].registration, "clock_ahead_ms", -20_000)),
    "RachisQueueGrowing": ("router", lambda seen: setattr(seen.overview.pools[1], "waiting_requests", 9)),
    "RachisTtftObjectiveMissed": ("objectives.ttft_s", lambda seen: setattr(seen.overview.ttft, "p90_s", 6.0)),
    "RachisIndexStale": ("index", lambda seen: setattr(seen.index, "stale", True)),
    "RachisWorkerSilent": (
        "index",
        lambda seen: seen.index.workers.add(worker_id="decode-0", in_sync=True, silent=True),
    ),
    "RachisWorkerNotInSync": ("index", lambda seen: seen.index.workers.add(worker_id="decode-0")),
    "RachisIndexLagging": (
        "decode-0",
        lambda seen: seen.index.workers.add(worker_id="decode-0", in_sync=True, lag_batches=101),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_told_and_nothing_else(name: str) -> None:
    subject, change = PLANTED[name]
    assert told(sight(change)) == [(name, subject)]


def test_each_alert_has_the_name_the_severity_and_the_runbook_of_the_one_for_prometheus() -> None:
    rules = {
        rule["alert"]: rule["labels"]["severity"]
        for path in (ROOT / "cluster_configs" / "alerts").glob("*.yaml")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert {name: severity for name, severity, _ in LOOKS}.items() <= rules.items()
    assert all((ROOT / "docs" / "runbooks" / f"{name}.md").exists() for name, _, _ in LOOKS)
    assert PLANTED.keys() == {name for name, _, _ in LOOKS}


def test_the_most_severe_comes_first() -> None:
    def two(seen: Sight) -> None:
        PLANTED["RachisClockSkew"][1](seen)
        PLANTED["RachisRegistryUnreachable"][1](seen)

    assert [alert.severity for alert in alerts_of(sight(two))] == ["critical", "warning"]


def test_a_sentence_about_few_requests_is_not_made() -> None:
    def few(seen: Sight) -> None:
        seen.overview.ttft.CopyFrom(admin.TimesOverview(requests=3, p90_s=60.0, objective_s=5.0))

    assert told(sight(few)) == []


def test_queues_of_engines_and_of_the_router_count_together() -> None:
    def some(seen: Sight) -> None:
        seen.overview.router.queued_requests = 5
        seen.overview.pools[0].waiting_requests = seen.overview.pools[1].waiting_requests = 2

    assert told(sight(some)) == [("RachisQueueGrowing", "router")]
