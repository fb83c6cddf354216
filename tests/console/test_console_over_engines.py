"""The console in Chromium over real engines, through a run: what it shows is what the admin API says, at each step."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from rachis import AsyncClient, token_prompt
from rachis.v1 import admin_pb2 as admin

from tests.console.browser import Page
from tests.console.test_console import agree, confirmed, looks_at
from tests.integration.conftest import own_service, until, worker_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# Answers are as long as the model lets them be: they go on while the page is looked at.
_LONG = 3800
FLAGS = {
    "pools__prefill__workers": 1,
    "pools__decode__workers": 2,
    "gateway__port": None,
}


class Load:
    """Answers that go on until they are told to stop."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._running: list[asyncio.Task[None]] = []

    def more(self, requests: int) -> None:
        for _ in range(requests):
            number = len(self._running)
            self._running.append(asyncio.create_task(self._asks(number)))

    async def stop(self) -> None:
        for each in self._running:
            each.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()

    async def _asks(self, number: int) -> None:
        """Again and again: one that ends has a successor."""
        while True:
            prompt = token_prompt([(7 * number + at) % 250 for at in range(100)])
            async for _ in self._client.stream(prompt, max_tokens=_LONG, ignore_eos=True):
                pass


async def test_the_page_shows_what_the_api_says_while_load_rises_a_worker_is_killed_and_pools_change(
    page: Page, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        _, client = await stack.enter_async_context(own_service(tmp_path, **FLAGS))
        load = Load(client)
        stack.push_async_callback(load.stop)

        async def overview() -> admin.GetOverviewResponse:
            answer: admin.GetOverviewResponse = await client.admin.GetOverview(admin.GetOverviewRequest(workers=200))
            return answer

        await page.go((await client.router_status()).metrics_url.removesuffix("metrics"))
        await agree(page, overview, running=0, prefill=1, decode=2)
        load.more(3)
        await agree(page, overview, running=3)
        load.more(3)
        await agree(page, overview, running=6)
        await load.stop()
        said = await agree(page, overview, running=0)
        assert {row[0] for row in said["workers"].values()} == {"ready"}

        pid, generation = await worker_of(client, "decode-1")
        os.kill(pid, signal.SIGKILL)
        said = await agree(page, overview, decode=1)
        assert said["pools"]["prefill"]["states"] == {"ready": 1}
        said = await agree(page, overview, decode=2)
        assert (await worker_of(client, "decode-1"))[1] > generation

        await looks_at(page, "pools")
        await page.type("#size-decode", "3")
        await page.click("Scale decode")
        await confirmed(page, "decode")
        await looks_at(page, "now")
        await agree(page, overview, decode=3)
        await looks_at(page, "pools")
        await page.click("Drain decode-0")
        await confirmed(page, "decode-0")
        await page.until("document.querySelector('.said')?.textContent.includes('drain decode-0: done')")
        await looks_at(page, "now")
        said = await agree(page, overview, decode=2)
        assert said["workers"]["decode-0"][0] == "draining"

        # What is asked for now is answered by the others.
        answer = await client.generate(token_prompt(list(range(40))), max_tokens=5, ignore_eos=True, request_id="mine")
        assert answer.completion.route.decode_worker_id in ("decode-1", "decode-2")
        await looks_at(page, "requests/mine")
        shown = "[...document.querySelectorAll('main tbody td, main tbody th')].map((each) => each.textContent)"
        await until(lambda: _includes(page, shown, "decode"), "the way of the request is shown", 60.0)


async def _includes(page: Page, expression: str, word: str) -> bool:
    return any(word in each for each in await page.value(expression))
