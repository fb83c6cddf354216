"""A whole gateway, vLLM's front and all, whose callers are known by certificates.

Its router is in this process, over stand-ins for engines: what they answer is not looked at.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import websockets

from cluster_configs.schema import GatewaySection, SecuritySection
from control_plane.access.key_file import edit
from control_plane.access.roles import HTTP_NEEDS, Identity, Need, Role
from control_plane.service.gateways import GatewayLogs, Gateways
from tests.process.control_plane.access.certified_world import ONE_SENTENCE, Certified, certified_cluster
from tests.process.control_plane.access.conftest import made_keys

pytestmark = pytest.mark.integration

MODEL = "fake"
_START_TIMEOUT_S = 240.0


class World:
    """url: of a gateway. certified: of its router."""

    def __init__(self, url: str, certified: Certified) -> None:
        self.url = url
        self.certified = certified

    def http(self, who: str, **options: Any) -> httpx.AsyncClient:
        browser = self.certified.browser(who, f"spiffe://acme/{who}")
        return httpx.AsyncClient(base_url=self.url, verify=browser, timeout=60.0, **options)


@pytest_asyncio.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("certified")
    async with certified_cluster(folder, made_keys(tmp_path_factory.mktemp("keys"))) as certified:
        cluster = certified.keyed.cluster
        for worker in cluster.workers:
            worker.record.model.tokenizer, worker.record.model.vocabulary_size = "builtin", 1024
            cluster.registry.write(worker.record)
        chain, key = map(str, certified.own_files)
        authority = str(certified.authority.ca)
        security = SecuritySection(
            secret_file=str(folder / "secret"), certificate_file=chain, certificate_key_file=key, ca_file=authority,
            client_ca_file=authority,
        )  # fmt: skip
        section = GatewaySection(host="127.0.0.1", port=0)
        gateways = Gateways(section, certified.address, GatewayLogs(folder / "gateways", ""), security=security)
        gateways.start()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                url = await gateways.first_url()
            yield World(url, certified)
        finally:
            await gateways.stop()
            # Those of the gateway are not counted here.
            cluster.calls = sum(cluster.outcomes.values())


@pytest.mark.parametrize("who", ["nobody", *Role])
async def test_every_route_lets_in_the_certificates_that_the_table_says(world: World, who: str) -> None:
    roles = frozenset({Role(who)}) if who != "nobody" else frozenset[Role]()
    identity = Identity(who, "acme", roles, 0)
    async with world.http(who) as http:
        for path, need in {**HTTP_NEEDS, "/reset_prefix_cache": Need.OPERATE, "/": Need.OPERATE}.items():
            for method in ("GET", "POST"):
                asked = path.replace("{id}", "resp_none")
                answer = await http.request(method, asked, json={} if method == "POST" else None)
                if need is Need.NOTHING:
                    assert answer.status_code not in (401, 403), (method, path)
                elif who == "nobody":
                    assert answer.status_code == 401 and ONE_SENTENCE in answer.text, (method, path)
                else:
                    assert (answer.status_code == 403) == (not identity.may(need)), (method, path, answer.text)
                    assert answer.status_code != 401, (method, path)


async def test_answers_come_by_a_certificate_and_a_key_that_is_brought_counts_alone(world: World) -> None:
    completion = {"model": MODEL, "prompt": "hello", "max_tokens": 3}
    async with world.http("generate") as http:
        answer = await http.post("/v1/completions", json=completion)
        assert answer.status_code == 200, answer.text
        wrong = await http.post("/v1/completions", json=completion, headers={"authorization": "Bearer none"})
        assert wrong.status_code == 401
        key = world.certified.keyed.key["observe"]
        looker = await http.post("/v1/completions", json=completion, headers={"x-api-key": key})
        assert looker.status_code == 403 and "the key `observe` has observe" in looker.text


async def test_openais_client_leaves_its_key_out_as_the_guide_says(world: World) -> None:
    browser = openai.DefaultAsyncHttpxClient(verify=world.certified.browser("generate", "spiffe://acme/generate"))
    url = f"{world.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=browser) as client:
        wishes: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3}
        assert (await client.completions.create(**wishes, extra_headers={"Authorization": openai.Omit()})).choices
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(**wishes)


async def test_a_websocket_talks_by_a_certificate_until_its_entry_is_revoked(world: World) -> None:
    url = world.url.replace("https", "wss") + "/v1/responses"
    with pytest.raises(websockets.InvalidStatus) as raised:
        await websockets.connect(url, ssl=world.certified.browser("client"))
    assert raised.value.response.status_code == 401
    world.certified.know("leaves", "uri:spiffe://acme/leaves")
    browser = world.certified.browser("leaves", "spiffe://acme/leaves")

    async def is_known() -> bool:
        async with httpx.AsyncClient(base_url=world.url, verify=browser) as http:
            return (await http.get("/v1/models")).status_code == 200

    await _until(is_known, is_so=True)
    async with websockets.connect(url, ssl=browser) as talking:
        assert await _answer(talking) == "response.completed"
        edit(world.certified.keyed.keys_file, lambda keys: _forget(keys, "leaves"))
        await _until(is_known, is_so=False)
        assert (await _answer(talking)).startswith("invalid_api_key ")


def _forget(keys: Any, name: str) -> None:
    for key_id in [each.key_id for each in keys.values() if each.name == name]:
        del keys[key_id]


async def _until(condition: Any, *, is_so: bool) -> None:
    for _ in range(300):
        if await condition() == is_so:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the file was not taken up")


async def _answer(talking: Any) -> str:
    """The last event's type, or the code of an error."""
    create = '{"type": "response.create", "model": "fake", "input": "hello", "max_output_tokens": 3}'
    await talking.send(create)
    async with asyncio.timeout(60.0):
        async for frame in talking:
            event = json.loads(frame)
            if event["type"] == "error":
                return f"{event['error']['code']} {event['error']['message']}"
            if event["type"] in ("response.completed", "response.incomplete"):
                return "response.completed"
    raise AssertionError("the connection ended")
