"""The console in Chromium through a run: what it shows is what the admin API says, at each step."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.console.pages import ConsolePages
from control_plane.metrics.probe_server import Probes
from tests.console.axe import findings
from tests.console.browser import Page
from tests.console.pictures import SETTINGS, VIEWS
from tests.console.world import shown_service
from tests.fakes.cluster import DECODE, PREFILL, named, until

HOSTILE = ('"><img src=x onerror="window.hacked=1">', "<script>window.hacked=1</script>", "javascript:window.hacked=1")
# What the admin API says of the service.
Overview = Callable[[], Awaitable[admin.GetOverviewResponse]]
_TIMEOUT_S = 60.0
_LOOK_S = 0.1

# What the view `now` shows, as numbers.
_SHOWN = """(() => {
  const number = (text) => Number(text.replace(/[^0-9]/g, ''));
  const tile = (name) => number(document.querySelector(`[data-tile="${name}"] .value`)?.textContent ?? '-1');
  const states = (card) => [...card.querySelectorAll('.states > span')].filter((each) => each.querySelector('.state'))
    .map((each) => [each.querySelector('.state').textContent.replaceAll(' ', '_'), number(each.textContent)]);
  const cards = [...document.querySelectorAll('article[data-pool]')];
  const pools = Object.fromEntries(cards.map((card) => [card.dataset.pool, {
    states: Object.fromEntries(states(card)),
    running: number(card.querySelector('dd')?.textContent ?? '-1'),
  }]));
  const workers = Object.fromEntries([...document.querySelectorAll('tbody tr[data-name]')].map((row) =>
    [row.dataset.name, [row.querySelector('.state').textContent, number(row.children[3].textContent)]]));
  const alerts = [...document.querySelectorAll('[data-alert]')].map((each) => each.dataset.alert).sort();
  return {running: tile('running'), queued: tile('queued'), sessions: tile('sessions'), pools, workers, alerts};
})()"""


def told(overview: admin.GetOverviewResponse) -> dict[str, Any]:
    """The same as the admin API tells it."""
    return {
        "running": overview.router.in_flight_requests,
        "queued": overview.router.queued_requests,
        "sessions": overview.router.open_sessions,
        "pools": {
            name: {"states": dict(pool.workers), "running": pool.running_requests}
            for name, pool in zip(("prefill", "decode"), overview.pools, strict=True)
        },
        "workers": {row.worker_id: [row.state.replace("_", " "), row.running_requests] for row in overview.workers},
        "alerts": sorted(alert.name for alert in overview.alerts),
    }


async def agree(page: Page, overview: Overview, **wanted: int) -> dict[str, Any]:
    """Page and admin API say the same; wanted: of `running`, and of pools so many workers that are ready."""
    seen: Any = None
    said: dict[str, Any] = {}
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                said, seen = told(await overview()), await page.value(_SHOWN)
                ready = {name: pool["states"].get("ready", 0) for name, pool in said["pools"].items()}
                if seen == said and wanted.items() <= {"running": said["running"], **ready}.items():
                    return said
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        pytest.fail(f"page {json.dumps(seen)}\nAPI {json.dumps(said)}\nwanted {wanted}")


async def looks_at(page: Page, view: str) -> None:
    await page.value(f"location.hash = {json.dumps(view)}")
    name = view.partition("/")[0]
    await page.until(f"document.querySelector('nav [aria-current]')?.textContent === {json.dumps(name)}")


async def confirmed(page: Page, word: str) -> None:
    await page.type("#confirm-word", word)
    await page.until("!document.querySelector('dialog button.strong').disabled")
    await page.click("Go on")


async def test_the_page_shows_what_the_api_says_while_load_rises_workers_go_and_pools_change(
    page: Page,
) -> None:
    async with shown_service(**SETTINGS) as shown:
        await page.go(shown.url)
        await agree(page, shown.overview, running=0, prefill=1, decode=2)

        shown.hold(5)
        await until(lambda: shown.cluster.parts.admission.in_flight == 5)
        await agree(page, shown.overview, running=5)
        shown.hold(4, "more")
        await agree(page, shown.overview, running=9)
        await shown.release()
        await agree(page, shown.overview, running=0)
        # Nobody has configured one for TPOT.
        for name, objective in (("TTFT P90", "keeps 5.00 s"), ("TPOT P90", "no objective")):
            detail = f"""document.querySelector('[data-tile="{name}"]:not(.bad) .detail')?.textContent"""
            await page.until(f"({detail} ?? '').endsWith({json.dumps(objective)})")

        gone = named(shown.cluster, "decode-1")
        shown.cluster.workers.remove(gone)
        await gone.crash()
        await shown.cluster.unregister(gone)
        said = await agree(page, shown.overview, decode=1)
        assert said["alerts"] == ["RachisPoolBelowMinimum"]
        await shown.cluster.add(DECODE, "decode-1", number=90, forms_batches=True)
        said = await agree(page, shown.overview, decode=2)
        assert said["alerts"] == []

        await looks_at(page, "pools")
        await page.type("#size-decode", "3")
        await page.click("Scale decode")
        await confirmed(page, "decode")
        await page.until("document.querySelector('.said')?.textContent.includes('scale decode to 3: done')")
        await page.click("Drain decode-0")
        await confirmed(page, "decode-0")
        await page.until("document.querySelector('.said')?.textContent.includes('drain decode-0: done')")
        await looks_at(page, "now")
        said = await agree(page, shown.overview, decode=2)
        assert said["pools"]["decode"]["states"] == {"ready": 2, "draining": 1}
        assert said["workers"]["decode-0"][0] == "draining"


async def test_workers_that_do_both_are_one_pool_whose_requests_are_explained_by_their_ways(page: Page) -> None:
    flags = {"pools__shared__workers": 2, "placement__policy": "objectives", "objectives__tpot_s": 0.05}
    async with shown_service(0, 0, **{**SETTINGS, **flags}) as shown:
        await page.go(shown.url)
        pools = "[...document.querySelectorAll('article[data-pool]')].map((card) => card.dataset.pool).join()"
        await page.until(f"{pools} === 'shared'")
        await shown.cluster.generate(request_id="mine", max_tokens=4)
        told = await shown.cluster.admin.ExplainPlacement(admin.ExplainPlacementRequest(request_id="mine"))
        await looks_at(page, "placement/mine")
        ways = "[...document.querySelectorAll('section.card tbody tr')].map((row) => row.dataset.name).join()"
        expected = ",".join(f"{way.worker_id} {way.way}" for way in told.ways)
        await page.until(f"{ways} === {json.dumps(expected)}")
        await looks_at(page, "pools")
        await page.type("#size-shared", "3")
        await page.click("Scale shared")
        await confirmed(page, "shared")
        await page.until("document.querySelector('.said')?.textContent.includes('scale shared to 3: done')")


async def test_a_word_that_is_not_typed_changes_nothing(page: Page) -> None:
    async with shown_service(**SETTINGS) as shown:
        await page.go(f"{shown.url}#pools")
        await page.click("Drain decode-0")
        await page.type("#confirm-word", "decode-1")
        assert await page.until("document.querySelector('dialog button.strong').disabled")
        await page.click("Cancel")
        await page.until("!document.querySelector('dialog')")
        rows = (await shown.overview()).workers
        assert {row.state for row in rows} == {"ready"}


async def test_names_that_would_be_scripts_are_shown_as_text_and_none_runs(page: Page) -> None:
    async with shown_service(**SETTINGS) as shown:
        for name in HOSTILE:
            record = wire.WorkerRegistration(worker_id=name, node=name, phase=name, generation=90, pool=PREFILL)
            record.state = wire.WORKER_STATE_STARTING
            await shown.cluster.register(record)
        for number, name in enumerate(HOSTILE):
            await shown.cluster.generate(f"hello {number}", request_id=name)
        await page.go(shown.url)
        await agree(page, shown.overview)
        for view in (*VIEWS, *(f"requests/{name.replace('/', '%2F')}" for name in HOSTILE)):
            await looks_at(page, view)
            for name in HOSTILE if view in ("now", "pools", "requests", "placement") else ():
                await page.until(f"document.body.textContent.includes({json.dumps(name)})")
        assert await page.value("window.hacked") is False
        assert await page.value("document.querySelectorAll('#console script, #console img').length") == 0


async def test_the_page_says_that_the_router_is_gone_and_comes_back_with_it(page: Page) -> None:
    async with shown_service(**SETTINGS) as shown:
        await page.go(shown.url)
        await agree(page, shown.overview)
        metrics, loop = shown.cluster.router.metrics, asyncio.get_running_loop()
        host, _, port = metrics.address.rpartition(":")
        await asyncio.to_thread(metrics.close)
        await page.until("document.querySelector('.connection.lost')?.textContent.includes('the router is gone')")
        assert await page.value("document.querySelectorAll('article[data-pool]').length") == 2
        metrics.serve(host, int(port), Probes(loop, lambda: ""), ConsolePages(shown.cluster.parts.calls, loop))
        await agree(page, shown.overview)


async def test_a_thousand_workers_are_summed(page: Page) -> None:
    async with shown_service(**SETTINGS) as shown:
        for number in range(1000):
            record = wire.WorkerRegistration(worker_id=f"far-{number}", generation=9, pool=DECODE)
            record.state = wire.WORKER_STATE_READY
            record.load.running_requests = 2
            shown.cluster.registry.write(record)
        await page.go(shown.url)
        said = await agree(page, shown.overview, decode=1002)
        assert said["pools"]["decode"]["running"] == 2000 and len(said["workers"]) == 200
        assert await page.value("document.body.textContent.includes('803 more workers')")
        for number in range(1000):
            shown.cluster.registry.remove(f"far-{number}")


async def test_nothing_serious_keeps_anybody_from_reading_it(page: Page) -> None:
    async with shown_service(**SETTINGS) as shown:
        await shown.cluster.generate("hello", request_id="ask-1")
        shown.caches()
        shown.hold(3)
        await page.go(shown.url)
        await agree(page, shown.overview, running=3)
        views = (*VIEWS, "requests/ask-1", "now/RachisClockSkew")
        few = ("now", "pools")
        for width, scheme, these in (
            (1280, "light", views), (1280, "dark", few), (400, "light", few), (400, "dark", views),
        ):  # fmt: skip
            await page.looks(width, 900, scheme)
            for view in these:
                await looks_at(page, view)
                await page.until("!!document.querySelector('main h1') && !!document.querySelector('main table')")
                assert await findings(page) == [], (view, width, scheme)
                beyond = await page.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert beyond <= 0, f"{view} is {beyond} px wider than {width} px"
