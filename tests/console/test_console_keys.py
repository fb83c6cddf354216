"""The console of a service with keys: who has none sees nothing, and a key shows and changes what its roles may."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest
import pytest_asyncio
from rachis.v1 import admin_pb2 as admin

from control_plane.access.api_keys import ApiKey
from control_plane.access.key_file import edit
from control_plane.access.roles import Role
from tests.console.browser import Page
from tests.console.test_console import agree, confirmed, looks_at
from tests.process.control_plane.access.conftest import Keyed, add_key, keyed_cluster, made_keys

_TIMEOUT_S = 60.0
_LOOK_S = 0.1
_FORM = "document.querySelector('form #key')"
_WORKERS = "document.querySelectorAll('tbody tr[data-name]').length"


@pytest_asyncio.fixture
async def keyed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Keyed]:
    made = made_keys(tmp_path_factory.mktemp("keys"))
    async with keyed_cluster(tmp_path_factory.mktemp("service"), made) as world:
        yield world


async def shows(page: Page, key: str) -> None:
    """Types the key, in place of the one before."""
    await page.until(f"!!{_FORM}")
    await page.value(f"{_FORM}.value = ''")
    await page.type("#key", key)
    await page.click("Look")


async def said(page: Page, words: str) -> None:
    await page.until(f"(document.querySelector('[role=alert]')?.textContent ?? '').includes({json.dumps(words)})")


async def is_live(page: Page, who: str) -> None:
    await page.until("!!document.querySelector('.connection.live')")
    assert await page.value("document.querySelector('.who').textContent") == who
    await page.until(f"{_WORKERS} === 2")


async def _is_known(keyed: Keyed, who: str) -> None:
    """The router has read the file of keys again."""
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            with suppress(grpc.aio.AioRpcError):
                await keyed.identity(who)
                return
            await asyncio.sleep(_LOOK_S)


async def test_without_a_key_nothing_is_shown_and_a_key_shows_what_its_roles_may(page: Page, keyed: Keyed) -> None:
    async def overview() -> admin.GetOverviewResponse:
        asked = admin.GetOverviewRequest(workers=200)
        return await keyed.cluster.admin.GetOverview(asked, metadata=keyed.metadata("operate"))

    await page.go(f"http://{keyed.cluster.router.metrics.address}/")
    await page.until(f"!!{_FORM}")
    assert await page.value(f"{_WORKERS} + document.querySelectorAll('article[data-pool]').length") == 0
    assert not await page.value("document.body.textContent.includes('decode-0')")

    await shows(page, keyed.key["observe"] + "x")
    await said(page, "key")
    assert await page.value(_WORKERS) == 0
    await shows(page, keyed.key["generate"])
    await said(page, "observe")
    assert await page.value(_WORKERS) == 0

    await shows(page, keyed.key["observe"])
    await is_live(page, "observe")
    await agree(page, overview, prefill=1, decode=1)
    await looks_at(page, "pools")
    await page.until("!!document.querySelector('main table')")
    buttons = "[...document.querySelectorAll('main button')].map((each) => each.textContent.trim()).join()"
    assert "Drain" not in await page.value(buttons), "who may only look is offered nothing to change"

    await page.click("Leave")
    await page.until(f"!!{_FORM}")
    assert await page.value("sessionStorage.length + localStorage.length + document.cookie.length") == 0
    assert await page.value(_WORKERS) == 0
    await shows(page, keyed.key["ops"])
    await page.until("!!document.querySelector('.connection.live')")
    await page.click("Drain decode-0")
    await confirmed(page, "decode-0")
    await page.until("document.querySelector('.said')?.textContent.includes('drain decode-0: done')")
    (drained,) = keyed.written()
    assert (drained["key"], drained["call"], drained["status"]) == ("ops", "DrainWorker", "OK"), drained
    assert keyed.key["ops"] not in keyed.audit_file.read_text()


async def test_a_key_that_is_revoked_while_somebody_looks_shows_nothing_more(page: Page, keyed: Keyed) -> None:
    key = keyed.key["for-a-day"] = add_key(keyed.keys_file, "for-a-day", Role.OBSERVE)
    await _is_known(keyed, "for-a-day")
    await page.go(f"http://{keyed.cluster.router.metrics.address}/")
    await shows(page, key)
    await is_live(page, "for-a-day")

    def forget(keys: dict[str, ApiKey]) -> None:
        keys.pop(next(each.key_id for each in keys.values() if each.name == "for-a-day"))

    edit(keyed.keys_file, forget)
    await page.until(f"!!{_FORM}", timeout_s=60.0)
    assert await page.value(_WORKERS) == 0
    await said(page, "key")
    await shows(page, keyed.key["observe"])
    await is_live(page, "observe")


async def test_a_key_is_in_no_address_and_goes_with_the_tab(page: Page, keyed: Keyed) -> None:
    await page.go(f"http://{keyed.cluster.router.metrics.address}/")
    await shows(page, keyed.key["observe"])
    await is_live(page, "observe")
    asked = "performance.getEntriesByType('resource').map((each) => each.name).concat(location.href).join()"
    assert keyed.key["observe"] not in await page.value(asked)
    await page.value("location.reload()")
    await is_live(page, "observe")
    kept = await page.value("JSON.stringify([Object.keys(localStorage), document.cookie])")
    assert json.loads(kept) == [[], ""]
