"""What a router's page of metrics says, for measurements that look at it from outside."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rachis import AsyncClient

_TIMEOUT_S = 30.0


async def samples(address: str) -> list[Sample]:
    """All of them, of the router that answers there."""
    async with AsyncClient(address) as client:
        url = (await client.router_status()).metrics_url
    text = await asyncio.to_thread(_read, url)
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        return str(answer.read().decode())
