"""The index and placement, on a router's page."""

import asyncio
import re
import urllib.request

from tests.fakes.cluster import Cluster


async def test_a_scrape_tells_of_index_and_placement(cluster: Cluster) -> None:
    await cluster.generate("hello " * 50)

    def read() -> str:
        with urllib.request.urlopen(f"http://{cluster.router.metrics.address}/metrics", timeout=60) as response:
            text: str = response.read().decode()
            return text

    text = await asyncio.to_thread(read)

    assert re.search(r"^rachis_index_capacity_entries [1-9]", text, re.MULTILINE)
    assert re.search(r"^rachis_index_stale 0\.0$", text, re.MULTILINE)
    assert 'rachis_disaggregation_decisions_total{reason="always"} 1.0' in text
    assert 'rachis_placement_decisions_total{policy="hotness",pool="prefill"} 1.0' in text
    assert "rachis_replication_copies_total 0.0" in text
