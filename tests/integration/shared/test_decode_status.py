"""What a real service tells of how its decode worker forms the batch, to people and to Prometheus."""

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

PROMPT = [(13 * index + 7) % 250 for index in range(200)]
REQUESTS = 4


async def decode_view(client: AsyncClient) -> admin.WorkerView:
    views = await client.workers(batch_entries=100)
    return next(view for view in views if view.registration.worker_id.startswith("decode"))


async def test_requests_that_share_a_prompt_are_told_as_a_batch_that_shares_it(
    client: AsyncClient, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (await decode_view(client)).decode
    answers = [
        asyncio.create_task(client.generate(token_prompt([*PROMPT, index]), max_tokens=400, ignore_eos=True, seed=1))
        for index in range(REQUESTS)
    ]

    async def one_group() -> admin.WorkerView | None:
        view = await decode_view(client)
        shares = view.decode.running_requests == REQUESTS and view.decode.tip_tokens > 0
        return view if shares else None

    view: admin.WorkerView = await until(one_group, "all requests decode together")
    await asyncio.gather(*answers)

    assert view.decode.working_set_tokens < REQUESTS * len(PROMPT)
    assert [group.running for group in view.batch.groups if group.running] == [REQUESTS]
    after = (await decode_view(client)).decode
    assert sum(after.admissions.values()) - sum(before.admissions.values()) == REQUESTS
    assert after.shared_tokens_sum > before.shared_tokens_sum

    assert await status(target.address, StateFile(tmp_path), decode=True, worker="decode-0", as_json=True) == 0
    [told] = json.loads(capsys.readouterr().out)["workers"]
    assert told["decode"]["steps"] >= after.steps
    assert told["decode"]["batch"] is not None

    address = (await client.router_status()).metrics_address
    text = await asyncio.to_thread(_read, f"http://{address}/metrics")
    [line] = [each for each in text.splitlines() if each.startswith('rachis_decode_steps_total{worker="decode-0"')]
    assert float(line.split()[-1]) >= after.steps


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        text: str = response.read().decode()
        return text
