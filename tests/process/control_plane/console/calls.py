"""Calls of a router's console over HTTP, as a browser or somebody else makes them."""

import asyncio
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_TIMEOUT_S = 30.0


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"]["message"])


async def asked(address: str, path: str, body: bytes | None = None, method: str = "GET", **headers: str) -> Answer:
    """headers: of which `_` stands for `-`."""

    def ask() -> Answer:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, told, response.read().decode())
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def called(
    address: str, name: str, fields: Mapping[str, Any] | None = None, key: str = "", **headers: str
) -> Answer:
    """As the console's own page calls."""
    own = {"content_type": "application/json", "origin": f"http://{address}", "sec_fetch_site": "same-origin"}
    bearer = {"authorization": f"Bearer {key}"} if key else {}
    body = json.dumps(fields or {}).encode()
    return await asked(address, f"/api/{name}", body, "POST", **{**own, **bearer, **headers})


class EventStream:
    """A stream that is open; its methods wait, in threads."""

    def __init__(self, address: str, name: str, fields: Mapping[str, Any], key: str = "") -> None:
        self._connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._connection.request("POST", f"/api/{name}", json.dumps(fields).encode(), headers)
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def events(self) -> Iterator[Any]:
        for line in self._response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    def close(self) -> None:
        self._response.close()
        self._connection.close()


async def opened(address: str, name: str, fields: Mapping[str, Any] | None = None, key: str = "") -> EventStream:
    return await asyncio.to_thread(EventStream, address, name, fields or {}, key)
