"""Every expression of the shipped dashboards, read by promtool, and asked of a real Prometheus over a running service.

The service is the real router and the real workers' services over stand-ins for engines.
"""

import asyncio
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from rachis.v1 import admin_pb2 as admin

from cluster_core.ports import hold_port
from control_plane.service import child_process
from tests import ROOT
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster
from tests.process.cluster_configs.test_alert_rules import promtool
from tests.prometheus import RULE_FILES, binary
from tools.dashboards.panel import defined
from tools.dashboards.table import histograms, metrics
from tools.reference.labels import LABELS
from tools.reference.metrics import HISTOGRAM_SERIES

FOLDER = ROOT / "cluster_configs" / "dashboards"
SCRAPE_S = 1
WAIT_S = 280
# What a service without pools, gateways and a collector of traces, on which all goes well, does not have.
ABSENT = (
    "ALERTS",
    "rachis_gateway_",
    "rachis_pool_",
    "rachis_workers_lost_total",
    "rachis_traces_",
    "rachis_index_untrue_claims",
    "rachis_worker_stalled_seconds",
    "rachis_session_refusals_total",
    "rachis_placement_ways_total",
)


def expressions() -> list[str]:
    """As the dashboards have them."""
    found = []
    for file in sorted(FOLDER.glob("*.json")):
        panels = json.loads(file.read_text())["panels"]
        found += [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return found


def chosen(expression: str) -> str:
    """With what a reader has chosen in Grafana."""
    for name, value in (("$job", "rachis"), ("$instance", ".*"), ("$__rate_interval", f"{60 * SCRAPE_S}s")):
        expression = expression.replace(name, value)
    return expression


def is_absent(expression: str) -> bool:
    return any(re.search(rf"\b{name}", expression) for name in ABSENT)


class Prometheus:
    """Scrapes one router as the job `rachis`."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self._url = url
        self._process = process
        self._log = log

    async def series(self, expression: str) -> list[dict[str, Any]]:
        """Raises HTTPError where it cannot read the expression."""
        return await asyncio.to_thread(self._read, expression)

    async def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """Of the series that it names."""
        path = "query_exemplars?" + urllib.parse.urlencode({"query": expression, "start": "0", "end": str(1 << 40)})
        return await asyncio.to_thread(self._get, path)

    async def has_seen(self, samples: int) -> bool:
        """So many scrapes of the router. Raises AssertionError where it has ended."""
        assert self._process.poll() is None, self._log.read_text()
        with suppress(OSError):
            found = await self.series('count_over_time(up{job="rachis"}[10m])')
            return bool(found) and float(found[0]["value"][1]) >= samples
        return False

    def _read(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("query?" + urllib.parse.urlencode({"query": expression}))["result"]
        return found

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=30) as response:
            return json.load(response)["data"]


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[Prometheus]:
    config = {
        "global": dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{SCRAPE_S}s"),
        "rule_files": [str(file) for file in RULE_FILES],
        "scrape_configs": [{"job_name": "rachis", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    where = f"127.0.0.1:{hold_port('127.0.0.1')}"
    command = [binary("prometheus"), f"--config.file={folder / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={folder / 'figures'}", f"--web.listen-address={where}"]
    command += ["--enable-feature=exemplar-storage"]
    process = child_process.start_bound(command, folder / "prometheus.log")
    try:
        yield Prometheus(f"http://{where}", process, folder / "prometheus.log")
    finally:
        child_process.stop(process, 5)


async def until_seen(server: Prometheus, samples: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await server.has_seen(samples):  # noqa: ASYNC110 - another process tells of nothing by itself
            await asyncio.sleep(SCRAPE_S / 4)


async def ask_again(server: Prometheus, asked: dict[str, Any]) -> None:
    """While something is not there: a router that is busy leaves figures out of a scrape."""
    async with asyncio.timeout(WAIT_S):
        while missing := [expression for expression, found in asked.items() if not (found or is_absent(expression))]:
            await asyncio.sleep(SCRAPE_S)
            asked |= {expression: await server.series(chosen(expression)) for expression in missing}


async def work(cluster: Cluster) -> None:
    """A request, and a session, each with its answer."""
    await cluster.generate()
    session = cluster.session()
    await session.open()
    await session.append(" again")
    await session.finish()
    await session.answer()


def test_promtool_reads_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{at}", "expr": chosen(expr)} for at, expr in enumerate(expressions())]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert len(rules) > 100
    assert f"{len(rules)} rules found" in promtool("check", "rules", "--lint=none", str(file))


def test_promtool_finds_an_expression_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "panels.yaml"
    file.write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": [{"record": "a:b", "expr": "sum (rate(x))"}]}]})
    )
    with pytest.raises(AssertionError, match="expected type range vector"):
        promtool("check", "rules", str(file))


async def test_every_panel_over_a_running_service_shows_what_the_service_has(empty: Cluster, tmp_path: Path) -> None:
    await empty.add(PREFILL)
    await empty.add(DECODE, forms_batches=True)
    async with prometheus(tmp_path, empty.router.metrics.address) as server:
        await until_seen(server, 1)
        await work(empty)
        seen = float((await server.series('count_over_time(up{job="rachis"}[10m])'))[0]["value"][1])
        await until_seen(server, int(seen) + 3)

        asked = {expression: await server.series(chosen(expression)) for expression in expressions()}
        with suppress(TimeoutError):
            await ask_again(server, asked)
        assert {expression for expression, found in asked.items() if not found} == set(filter(is_absent, asked))
        (ended,) = await server.series(chosen("sum (increase(rachis_requests_total[$__rate_interval]))"))
        assert float(ended["value"][1]) > 1


async def test_prometheus_keeps_the_traces_that_times_to_first_token_lead_to(tmp_path: Path) -> None:
    # Every request misses this one.
    async with running_cluster(objectives__ttft_s=1e-9) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        async with prometheus(tmp_path, cluster.router.metrics.address) as server:
            await cluster.generate(request_id="ask-1")
            trace = await cluster.admin.GetTrace(admin.GetTraceRequest(request_id="ask-1"))
            await until_seen(server, 1)
            seen = float((await server.series('count_over_time(up{job="rachis"}[10m])'))[0]["value"][1])
            await until_seen(server, int(seen) + 2)
            (found,) = await server.exemplars("rachis_request_ttft_seconds_bucket")
    assert {each["labels"]["trace_id"] for each in found["exemplars"]} == {trace.trace_id}


async def test_a_router_has_no_more_series_and_values_of_labels_than_the_reference_says(
    cluster: Cluster, tmp_path: Path
) -> None:
    await work(cluster)
    async with prometheus(tmp_path, cluster.router.metrics.address) as server:
        await until_seen(server, 1)
        found = await server.series('{__name__=~"rachis_.+",job="rachis"}')

    bounds = {label.name: label.most for label in LABELS}
    values: dict[tuple[str, str], set[str]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    for series in found:
        labels = dict(series["metric"])
        name = defined(labels.pop("__name__"), histograms())
        for label, value in labels.items():
            values.setdefault((name, label), set()).add(value)
        if name in histograms():
            at = (name, *(labels[label] for label in metrics()[name].labels))
            sizes[at] = sizes.get(at, 0) + 1
    assert sizes
    assert max(sizes.values()) <= HISTOGRAM_SERIES
    for (name, label), seen in values.items():
        most = bounds.get(label)
        assert most is None or len(seen) <= most, (name, label, seen)
