"""The shipped alert rules, asked by promtool what they make of figures that a test invents.

Beside the figures of a healthy service each fault changes some. Exactly the alerts that it names must fire, and not
before their time.
"""

import asyncio
import re
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.cluster import Cluster
from tests.prometheus import RULE_FILES, alert_rules, binary

SCRAPE_S = 15
LONG_S = 2400
ROUTER = 'instance="r:1",job="rachis"'
CLASS = 'class="interactive"'
# Series of a healthy service in promtool's notation: `a+bxn` grows by b at each of n scrapes.
HEALTHY = {
    f"up{{{ROUTER}}}": "1x200",
    f'rachis_build_info{{{ROUTER},version="0.1.0"}}': "1x200",
    f'rachis_requests_total{{{ROUTER},outcome="finished"}}': "0+30x200",
    f'rachis_requests_total{{{ROUTER},outcome="failed"}}': "0x200",
    f'rachis_requests_total{{{ROUTER},outcome="expired"}}': "0x200",
    f'rachis_requests_total{{{ROUTER},outcome="cancelled"}}': "0+10x200",
    f'rachis_request_errors_total{{{ROUTER},status="RESOURCE_EXHAUSTED"}}': "0x200",
    f'rachis_rate_refusals_total{{{ROUTER},limit="requests_per_s"}}': "0x200",
    f'rachis_rate_refusals_total{{{ROUTER},limit="tokens_per_s"}}': "0x200",
    f"rachis_router_queued_requests{{{ROUTER}}}": "0x200",
    f'rachis_worker_requests{{{ROUTER},worker="prefill-0",state="running"}}': "60x200",
    f'rachis_worker_requests{{{ROUTER},worker="prefill-0",state="waiting"}}': "0x80 90x10 0x110",
    f'rachis_worker_requests{{{ROUTER},worker="decode-0",state="waiting"}}': "4x200",
    f'rachis_request_ttft_seconds_bucket{{{ROUTER},{CLASS},le="1.0"}}': "0+28x200",
    f'rachis_request_ttft_seconds_bucket{{{ROUTER},{CLASS},le="5.0"}}': "0+28x200",
    f'rachis_request_ttft_seconds_bucket{{{ROUTER},{CLASS},le="10.0"}}': "0+30x200",
    f'rachis_request_ttft_seconds_bucket{{{ROUTER},{CLASS},le="+Inf"}}': "0+30x200",
    f"rachis_request_ttft_seconds_count{{{ROUTER},{CLASS}}}": "0+30x200",
    f"rachis_objective_ttft_seconds{{{ROUTER},{CLASS}}}": "5x200",
    f"rachis_poisoned_requests{{{ROUTER}}}": "0x200",
    f"rachis_slow_readers_total{{{ROUTER}}}": "0x20 2x180",
    f'rachis_worker_stalled_seconds{{{ROUTER},worker="decode-0"}}': "0x200",
    f'rachis_worker_quarantined_blocks{{{ROUTER},worker="decode-0"}}': "0x20 31x5 0x175",
    f"rachis_registry_connected{{{ROUTER}}}": "1x200",
    f'rachis_workers_lost_total{{{ROUTER},pool="decode"}}': "3x200",
    f'rachis_worker_usable{{{ROUTER},worker="prefill-0",pool="prefill",node="h1"}}': "1x200",
    f'rachis_worker_usable{{{ROUTER},worker="prefill-1",pool="prefill",node="h1"}}': "1x200",
    f'rachis_worker_usable{{{ROUTER},worker="decode-0",pool="decode",node="h2"}}': "1x200",
    f'rachis_worker_usable{{{ROUTER},worker="decode-1",pool="decode",node="h2"}}': "1x200",
    f'rachis_pool_ready_workers{{{ROUTER},pool="prefill"}}': "2x200",
    f'rachis_pool_ready_workers{{{ROUTER},pool="decode"}}': "2x200",
    f'rachis_pool_minimum_workers{{{ROUTER},pool="prefill"}}': "1x200",
    f'rachis_pool_minimum_workers{{{ROUTER},pool="decode"}}': "2x200",
    f'rachis_handoffs_total{{{ROUTER},outcome="pulled"}}': "0+20x200",
    f'rachis_handoffs_total{{{ROUTER},outcome="local"}}': "0+9x200",
    f'rachis_handoffs_total{{{ROUTER},outcome="recomputed"}}': "0+1x200",
    f'rachis_handoffs_total{{{ROUTER},outcome="none"}}': "0x200",
    f'rachis_handoffs_expired_total{{{ROUTER},worker="decode-0"}}': "4x200",
    f'rachis_handoffs_mismatched_total{{{ROUTER},worker="decode-0"}}': "0x200",
    f'rachis_node_memory_bytes{{{ROUTER},node="h1"}}': "100x200",
    f'rachis_node_available_bytes{{{ROUTER},node="h1"}}': "30x200",
    f'rachis_worker_version_skew{{{ROUTER},worker="decode-0"}}': "0x200",
    f'rachis_worker_clock_ahead_seconds{{{ROUTER},worker="decode-0"}}': "-2x200",
    f"rachis_index_stale{{{ROUTER}}}": "0x200",
    f'rachis_index_silent{{{ROUTER},worker="decode-0"}}': "0x200",
    f'rachis_index_in_sync{{{ROUTER},worker="decode-0"}}': "1x200",
    f'rachis_index_lag_batches{{{ROUTER},worker="decode-0"}}': "20x200",
    f"rachis_index_damaged_total{{{ROUTER}}}": "1x200",
    f'rachis_index_untrue_claims{{{ROUTER},worker="decode-0"}}': "0x200",
    f"rachis_index_entries{{{ROUTER}}}": "80x200",
    f"rachis_index_capacity_entries{{{ROUTER}}}": "100x200",
    f"rachis_index_dropped_total{{{ROUTER}}}": "0+1x200",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """series: what differs from `HEALTHY`; None: it is not there. quiet_s, loud_s: when nothing and when all fires."""

    fires: tuple[str, ...]
    series: dict[str, str | None]
    quiet_s: int
    loud_s: int


def only_up() -> dict[str, str | None]:
    return {name: None for name in HEALTHY if not name.startswith("up{")}


FAULTS = {
    "router gone": Fault(("RachisRouterDown",), {**only_up(), f"up{{{ROUTER}}}": "0x200"}, 45, 90),
    "router answers with nothing": Fault(("RachisRouterDown",), only_up(), 45, 90),
    "one in 20 fails": Fault(
        ("RachisRequestsFailing",),
        {f'rachis_requests_total{{{ROUTER},outcome="failed"}}': "0x20 0+2x180"},
        405,
        540,
    ),
    "one in 20 expires": Fault(
        ("RachisRequestsFailing",),
        {f'rachis_requests_total{{{ROUTER},outcome="expired"}}': "0x20 0+2x180"},
        405,
        540,
    ),
    "one in 40 is refused": Fault(
        ("RachisRouterOverloaded",),
        {f'rachis_request_errors_total{{{ROUTER},status="RESOURCE_EXHAUSTED"}}': "0x20 0+1x180"},
        525,
        600,
    ),
    "one in 40 is refused, and no rates are told": Fault(
        ("RachisRouterOverloaded",),
        {
            f'rachis_request_errors_total{{{ROUTER},status="RESOURCE_EXHAUSTED"}}': "0x20 0+1x180",
            f'rachis_rate_refusals_total{{{ROUTER},limit="requests_per_s"}}': None,
            f'rachis_rate_refusals_total{{{ROUTER},limit="tokens_per_s"}}': None,
        },
        525,
        600,
    ),
    "one in 40 is refused beside a tenant over its rate": Fault(
        ("RachisRouterOverloaded",),
        {
            f'rachis_request_errors_total{{{ROUTER},status="RESOURCE_EXHAUSTED"}}': "0x20 0+9x180",
            f'rachis_rate_refusals_total{{{ROUTER},limit="tokens_per_s"}}': "0x20 0+8x180",
        },
        525,
        600,
    ),
    "all fail, and hardly anybody asks": Fault(
        ("RachisRequestsFailing",),
        {
            f'rachis_requests_total{{{ROUTER},outcome="finished"}}': "0x200",
            f'rachis_requests_total{{{ROUTER},outcome="cancelled"}}': "0x200",
            f'rachis_requests_total{{{ROUTER},outcome="failed"}}': "0x20 1x3 2x3 3x3 4x3 5x3 6x3 7x3 8x3 9x3 10x140",
        },
        480,
        720,
    ),
    "the router's queue stands": Fault(
        ("RachisQueueGrowing",), {f"rachis_router_queued_requests{{{ROUTER}}}": "0x20 17x180"}, 600, 720
    ),
    "an engine's queue stands": Fault(
        ("RachisQueueGrowing",),
        {f'rachis_worker_requests{{{ROUTER},worker="decode-0",state="waiting"}}': "0x20 17x180"},
        600,
        720,
    ),
    "every eighth waits too long": Fault(
        ("RachisTtftObjectiveMissed",),
        {
            f'rachis_request_ttft_seconds_bucket{{{ROUTER},{CLASS},le="{bound}"}}': "0+26x200"
            for bound in ("1.0", "5.0")
        },
        285,
        345,
    ),
    "Redis gone": Fault(
        ("RachisRegistryUnreachable", "RachisIndexStale"),
        {f"rachis_registry_connected{{{ROUTER}}}": "1x20 0x180", f"rachis_index_stale{{{ROUTER}}}": "0x20 1x180"},
        300,
        360,
    ),
    "a worker lost": Fault(
        ("RachisWorkerLost",), {f'rachis_workers_lost_total{{{ROUTER},pool="decode"}}': "3x20 4x180"}, 300, 345
    ),
    "a poisoned request": Fault(
        ("RachisPoisonedRequest",), {f"rachis_poisoned_requests{{{ROUTER}}}": "0x20 1x180"}, 285, 330
    ),
    "clients that do not read": Fault(
        ("RachisSlowReaders",), {f"rachis_slow_readers_total{{{ROUTER}}}": "0x20 1+1x180"}, 300, 540
    ),
    "an engine hangs": Fault(
        ("RachisWorkerHangs",),
        {f'rachis_worker_stalled_seconds{{{ROUTER},worker="decode-0"}}': "0x20 2+15x180"},
        315,
        345,
    ),
    "a frozen pull": Fault(
        ("RachisBlocksQuarantined",),
        {f'rachis_worker_quarantined_blocks{{{ROUTER},worker="decode-0"}}': "0x20 31x180"},
        405,
        435,
    ),
    "a pool short": Fault(
        ("RachisPoolBelowMinimum",), {f'rachis_pool_ready_workers{{{ROUTER},pool="decode"}}': "2x20 1x180"}, 420, 480
    ),
    "one in ten recomputed": Fault(
        ("RachisHandoffFailures",), {f'rachis_handoffs_total{{{ROUTER},outcome="recomputed"}}': "0+3x200"}, 105, 180
    ),
    "pulls come too late": Fault(
        ("RachisLeaseExpiries",),
        {f'rachis_handoffs_expired_total{{{ROUTER},worker="decode-0"}}': "4x20 5+1x180"},
        330,
        600,
    ),
    "blocks of another prompt": Fault(
        ("RachisHandoffMismatch",),
        {f'rachis_handoffs_mismatched_total{{{ROUTER},worker="decode-0"}}': "0x20 1x180"},
        285,
        315,
    ),
    "memory full": Fault(
        ("RachisHostMemoryFull",), {f'rachis_node_available_bytes{{{ROUTER},node="h1"}}': "30x20 4x180"}, 600, 660
    ),
    "another version": Fault(
        ("RachisVersionSkew",), {f'rachis_worker_version_skew{{{ROUTER},worker="decode-0"}}': "0x20 1x180"}, 360, 420
    ),
    "a clock behind": Fault(
        ("RachisClockSkew",), {f'rachis_worker_clock_ahead_seconds{{{ROUTER},worker="decode-0"}}': "-11x200"}, 585, 645
    ),
    "a silent worker": Fault(
        ("RachisWorkerSilent",), {f'rachis_index_silent{{{ROUTER},worker="decode-0"}}': "0x20 1x180"}, 330, 360
    ),
    "a gap that stays": Fault(
        ("RachisWorkerNotInSync",), {f'rachis_index_in_sync{{{ROUTER},worker="decode-0"}}': "1x20 0x180"}, 360, 390
    ),
    "a feed that is behind": Fault(
        ("RachisIndexLagging",), {f'rachis_index_lag_batches{{{ROUTER},worker="decode-0"}}': "20x20 101x180"}, 360, 390
    ),
    "damaged batches": Fault(
        ("RachisIndexDamagedBatches",), {f"rachis_index_damaged_total{{{ROUTER}}}": "1x20 2x180"}, 300, 330
    ),
    "untrue claims": Fault(
        ("RachisIndexUntrueClaims",),
        {f'rachis_index_untrue_claims{{{ROUTER},worker="decode-0"}}': "0x20 1x180"},
        300,
        330,
    ),
    "an index too small": Fault(
        ("RachisIndexTooSmall",), {f"rachis_index_dropped_total{{{ROUTER}}}": "0+30x200"}, 2000, 2250
    ),
}


def question(changed: dict[str, str | None], expected: dict[int, tuple[str, ...]]) -> dict[str, Any]:
    """One case for promtool. expected: the alerts that fire, by time in seconds."""
    series = {name: values for name, values in {**HEALTHY, **changed}.items() if values is not None}
    return {
        "interval": f"{SCRAPE_S}s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{at_s}s",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in fires],
            }
            for at_s, fires in expected.items()
        ],
    }


def promtool(*arguments: str) -> str:
    """Its output. Raises AssertionError with it where it finds fault."""
    done = subprocess.run([binary("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ask(folder: Path, *cases: dict[str, Any]) -> str:
    file = folder / "cases.yaml"
    rules = [str(path) for path in RULE_FILES]
    file.write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": f"{SCRAPE_S}s", "tests": list(cases)}))
    return promtool("test", "rules", str(file))


def test_the_rule_files_are_valid() -> None:
    assert promtool("check", "rules", *map(str, RULE_FILES)).count("SUCCESS") == len(RULE_FILES)


def test_nothing_fires_on_a_healthy_service(tmp_path: Path) -> None:
    ask(tmp_path, question({}, dict.fromkeys(range(0, LONG_S, 60), ())))


def test_each_fault_fires_its_alerts_and_no_others_and_not_too_soon(tmp_path: Path) -> None:
    ask(
        tmp_path,
        *(question(fault.series, {fault.quiet_s: (), fault.loud_s: fault.fires}) for fault in FAULTS.values()),
    )


def test_promtool_finds_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="RachisWorkerLost"):
        ask(tmp_path, question({}, {LONG_S: ("RachisWorkerLost",)}))


def test_a_quiet_night_with_a_few_slow_requests_is_no_missed_objective(tmp_path: Path) -> None:
    few = {
        f'rachis_request_ttft_seconds_bucket{{{ROUTER},{CLASS},le="{bound}"}}': values
        for bound, values in (("1.0", "0x200"), ("5.0", "0x200"), ("10.0", "0x20 8x180"), ("+Inf", "0x20 8x180"))
    }
    changed = {**few, f"rachis_request_ttft_seconds_count{{{ROUTER},{CLASS}}}": "0x20 8x180"}
    ask(tmp_path, question(dict(changed), dict.fromkeys(range(0, LONG_S, 60), ())))


def test_a_tenant_over_its_rate_does_not_fill_the_router(tmp_path: Path) -> None:
    over = {
        f'rachis_requests_total{{{ROUTER},outcome="refused"}}': "0x20 0+8x180",
        f'rachis_request_errors_total{{{ROUTER},status="RESOURCE_EXHAUSTED"}}': "0x20 0+8x180",
        f'rachis_rate_refusals_total{{{ROUTER},limit="requests_per_s"}}': "0x20 0+5x180",
        f'rachis_rate_refusals_total{{{ROUTER},limit="tokens_per_s"}}': "0x20 0+3x180",
    }
    ask(tmp_path, question(dict(over), dict.fromkeys(range(0, LONG_S, 60), ())))


@pytest.mark.parametrize(
    "figure",
    [
        f'rachis_requests_total{{{ROUTER},outcome="failed"}}',
        f'rachis_request_errors_total{{{ROUTER},status="RESOURCE_EXHAUSTED"}}',
        f'rachis_handoffs_total{{{ROUTER},outcome="recomputed"}}',
    ],
)
def test_a_few_that_come_to_nothing_in_a_quiet_night_wake_nobody(tmp_path: Path, figure: str) -> None:
    """Four in ten minutes, and nobody else asks for anything."""
    quiet = {name: "0x200" for name in HEALTHY if re.match("rachis_(requests|handoffs)_total", name)}
    changed = {**quiet, figure: "0x20 1x10 2x10 3x10 4x150"}
    ask(tmp_path, question(dict(changed), dict.fromkeys(range(0, LONG_S, 60), ())))


def test_every_alert_has_a_fault_that_fires_it() -> None:
    assert {name for fault in FAULTS.values() for name in fault.fires} == set(alert_rules())


async def test_every_figure_in_a_rule_is_on_the_page_of_a_router(cluster: Cluster) -> None:
    def page() -> str:
        with urllib.request.urlopen(f"http://{cluster.router.metrics.address}/metrics", timeout=60) as response:
            text: str = response.read().decode()
            return text

    told = set(re.findall(r"^# TYPE (\S+)", await asyncio.to_thread(page), re.MULTILINE))
    told |= {
        f"rachis_request_ttft_seconds_{part}" for part in ("bucket", "count") if "rachis_request_ttft_seconds" in told
    }
    for name, rule in alert_rules().items():
        used = set(re.findall(r"(?<!:)\brachis_\w+", f"{rule['expr']} {rule['annotations']['description']}"))
        assert used <= told, name
    assert {series.partition("{")[0] for series in HEALTHY} <= told | {"up"}
