"""What a real service tells of its tiers, to people and to Prometheus."""

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest
from rachis import AsyncClient, token_prompt
from rachis.v1 import admin_pb2 as admin

from command_line.own_service import Target
from command_line.status.overview import status
from control_plane.service.state import StateFile
from tests.integration.conftest import until

pytestmark = pytest.mark.integration

PROMPT = [(11 * index + 5) % 250 for index in range(200)]
REQUESTS = 4


async def prefill_view(client: AsyncClient) -> admin.WorkerView:
    views = await client.workers(hottest_prefixes=100)
    return next(view for view in views if view.registration.worker_id.startswith("prefill"))


async def test_a_prompt_that_is_sent_again_is_a_hit_and_among_the_hottest(
    client: AsyncClient, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (await prefill_view(client)).tiers
    completions = [
        (await client.generate(token_prompt(PROMPT), temperature=0, max_tokens=2, ignore_eos=True)).completion
        for _ in range(REQUESTS)
    ]

    async def counted() -> bool:
        now = (await prefill_view(client)).tiers
        return bool(now.prompt_tokens - before.prompt_tokens >= REQUESTS * len(PROMPT))

    await until(counted, "all prompts counted")
    view = await prefill_view(client)
    block_size = view.registration.block_size_tokens
    blocks = len(PROMPT) // block_size
    hits = (view.tiers.device_hit_tokens + view.tiers.host_hit_tokens) - (
        before.device_hit_tokens + before.host_hit_tokens
    )
    assert hits == sum(completion.usage.cached_tokens for completion in completions) > 0
    assert view.tiers.device_capacity_blocks == view.load.total_blocks
    ours = [each for each in view.hottest.prefixes if each.tokens == blocks * block_size]
    assert any(each.frequency >= REQUESTS and each.device_blocks == blocks for each in ours), view.hottest

    assert await status(target.address, StateFile(tmp_path), tiers=True, as_json=True) == 0
    told = {each["worker_id"]: each["tiers"] for each in json.loads(capsys.readouterr().out)["workers"]}
    assert 0 < told["prefill-0"]["hit_ratio"]["device"] <= 1
    assert told["prefill-0"]["hottest_prefixes"]

    address = (await client.router_status()).metrics_address
    text = await asyncio.to_thread(_read, f"http://{address}/metrics")
    [line] = [
        each
        for each in text.splitlines()
        if each.startswith('rachis_tier_hit_tokens_total{tier="device",worker="prefill-0"')
    ]
    assert float(line.split()[-1]) > 0


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        text: str = response.read().decode()
        return text
