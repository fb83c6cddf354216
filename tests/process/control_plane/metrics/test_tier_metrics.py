"""The tiers of workers, on a router's page."""

import asyncio
import urllib.request

from tests.fakes.cluster import DECODE, PREFILL, Cluster


async def scrape(cluster: Cluster) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{cluster.router.metrics.address}/metrics", timeout=60) as response:
            text: str = response.read().decode()
            return text

    return await asyncio.to_thread(read)


async def test_a_scrape_shows_what_the_workers_say_at_that_moment(empty: Cluster) -> None:
    await empty.add(PREFILL)
    await empty.add(DECODE, has_tiers=False)
    await empty.generate()
    once = await scrape(empty)
    await empty.generate()

    twice = await scrape(empty)

    assert 'rachis_tier_prompt_tokens_total{worker="prefill-0"} 5.0' in once
    assert 'rachis_tier_prompt_tokens_total{worker="prefill-0"} 10.0' in twice
    assert 'rachis_tier_hit_tokens_total{tier="device",worker="prefill-0"} 4.0' in twice
    assert 'worker="decode-0"' not in _of_tiers(twice)


async def test_a_worker_that_is_gone_does_not_keep_the_others_from_being_read(cluster_2x2: Cluster) -> None:
    await cluster_2x2.workers[0].crash()

    text = await scrape(cluster_2x2)

    assert 'worker="prefill-0"' not in _of_tiers(text)
    assert 'rachis_tier_prompt_tokens_total{worker="prefill-1"} 0.0' in text


def _of_tiers(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("rachis_tier"))
