"""How decode workers form their batches, on a router's page."""

import asyncio
import urllib.request

from tests.fakes.cluster import DECODE, PREFILL, Cluster


async def test_a_scrape_tells_of_batches_and_tiers_in_one_asking(empty: Cluster) -> None:
    await empty.add(PREFILL)
    await empty.add(DECODE, forms_batches=True)
    await empty.generate()

    def read() -> str:
        with urllib.request.urlopen(f"http://{empty.router.metrics.address}/metrics", timeout=60) as response:
            text: str = response.read().decode()
            return text

    text = await asyncio.to_thread(read)

    assert 'rachis_decode_admissions_total{reason="idle",worker="decode-0"} 1.0' in text
    # The first of eight tokens comes with the request.
    assert 'rachis_decode_steps_total{worker="decode-0"} 7.0' in text
    assert 'rachis_decode_mode{mode="policy",worker="decode-0"} 1.0' in text
    assert 'rachis_decode_steps_total{worker="prefill-0"}' not in text
    assert 'rachis_tier_prompt_tokens_total{worker="prefill-0"} 5.0' in text
