"""A page of headless Chromium, driven over its DevTools protocol."""

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from cluster_core.clock import monotonic_s

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.05
_MOST_BYTES = 64 << 20


def chromium() -> str | None:
    """Where it is, on this machine."""
    return next((path for path in map(shutil.which, _NAMES) if path is not None), None)


class Page:
    """Made by `opened_page`. said: errors of its scripts, those that were not caught among them."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session = ""
        self.said: list[str] = []

    async def read(self) -> None:
        """Takes in what the browser tells, until cancelled."""
        async for text in self._connection:
            message = json.loads(text)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] == "Runtime.exceptionThrown":
                self.said.append(json.dumps(message["params"]["exceptionDetails"])[:500])
            elif message["method"] == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    self.said.append(entry["text"])

    async def attach(self) -> None:
        target = (await self.command("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.command(f"{domain}.enable")

    async def command(self, method: str, **params: Any) -> Any:
        number = len(self._answers) + 1
        while number in self._answers:
            number += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        session = {"sessionId": self._session} if self._session else {}
        await self._connection.send(json.dumps({"id": number, "method": method, "params": params, **session}))
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            message = await answer
        assert "error" not in message, message["error"]
        return message["result"]

    async def go(self, url: str) -> None:
        await self.command("Page.navigate", url=url)

    async def before_scripts(self, script: str) -> None:
        """Runs before any script of a page that is gone to from now on."""
        await self.command("Page.addScriptToEvaluateOnNewDocument", source=script)

    async def value(self, expression: str) -> Any:
        """What an expression of JavaScript comes to, as JSON; a promise is waited for."""
        told = await self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Its value, once it is one."""
        async with asyncio.timeout(timeout_s):
            while not (value := await self.value(expression)):  # noqa: ASYNC110 - the page tells of no such event
                await asyncio.sleep(_LOOK_EVERY_S)
        return value

    async def click(self, words: str) -> None:
        """The button, or the link, that says so."""
        await self.until(
            f"(() => {{ const each = [...document.querySelectorAll('button, a')].find((one) => "
            f"(one.getAttribute('aria-label') ?? one.textContent).trim() === {json.dumps(words)}); "
            "each?.click(); return Boolean(each); })()"
        )

    async def type(self, selector: str, text: str) -> None:
        name = json.dumps(selector)
        await self.until(f"(document.querySelector({name})?.focus(), document.activeElement?.matches({name}))")
        await self.command("Input.insertText", text=text)

    async def looks(self, width: int, height: int, scheme: str) -> None:
        """scheme: `light` or `dark`."""
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 640
        )
        await self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, *, whole: bool = True) -> str:
        """A PNG, in base64."""
        told = await self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return str(told["data"])


@asynccontextmanager
async def opened_page(program: str, folder: Path) -> AsyncIterator[Page]:
    """folder: an empty one, for the browser's profile."""
    process = await asyncio.create_subprocess_exec(
        program,
        *_FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        address = await asyncio.to_thread(_address, folder / "DevToolsActivePort")
        async with connect(address, max_size=_MOST_BYTES) as connection:
            page = Page(connection)
            reading = asyncio.create_task(page.read())
            try:
                await page.attach()
                yield page
            finally:
                reading.cancel()
    finally:
        process.terminate()
        await process.wait()


def _address(file: Path) -> str:
    """The browser writes port and path into this file once it listens."""
    until_s = monotonic_s() + _START_TIMEOUT_S
    while monotonic_s() < until_s:
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(_LOOK_EVERY_S)
    raise TimeoutError(f"the browser has not begun within {_START_TIMEOUT_S:g} s")
