"""`python -m tests.differential`: a service with a gateway and `vllm serve` of the same model, asked the same."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import httpx
from rich.progress import Progress

from cluster_configs.loading import load
from cluster_configs.schema import ModelSection
from cluster_core.clock import monotonic_s
from cluster_core.errors import StartError
from cluster_core.ports import hold_port
from command_line.own_service import target_service
from control_plane.service import child_process
from control_plane.service.state import StateFile
from tests.differential.compare import Answer, differences, explained
from tests.differential.requests import MODEL, Request, drawn

_START_S = 300.0
_AT_ONCE = 4


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    unexplained, reasons = asyncio.run(_compared(range(given.seed, given.seed + given.requests)))
    if given.json:
        figures = {"requests": given.requests, "unexplained": len(unexplained), "explained": dict(reasons)}
        print(json.dumps({**figures, "differences": unexplained}, indent=1))
    else:
        for seed, found in unexplained.items():
            print(f"seed {seed}: {drawn(seed)}", *found[:8], sep="\n    ")
        for reason, count in reasons.most_common():
            print(f"{count} times explained: {reason}")
        print(f"{given.requests} requests, {len(unexplained)} unexplained differences")
    return 1 if unexplained else 0


async def _compared(seeds: range) -> tuple[dict[int, list[str]], Counter[str]]:
    """Differences by seed, and how often which one was explained."""
    unexplained: dict[int, list[str]] = {}
    reasons: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="rachis-differential-") as folder:
        state = StateFile(Path(folder) / "state.json")
        async with target_service(None, state, load(), always_own=True) as target:
            ours, theirs = hold_port("127.0.0.1"), hold_port("127.0.0.1")
            gateway = ["command_line.main", "gateway", "--address", target.address, "--port", str(ours)]
            plain = ["vllm.entrypoints.launchers.api_server.entry", "--model", ModelSection().resolved_path]
            plain += ["--served-model-name", MODEL, "--port", str(theirs), "--enforce-eager", "--dtype", "float32"]
            plain += [
                "--max-model-len",
                str(load().config.engine.max_model_len),
                "--kv-cache-memory-bytes",
                "500000000",
            ]
            processes = [
                child_process.start_bound([sys.executable, "-m", *command], Path(folder) / f"{name}.log")
                for name, command in (("gateway", gateway), ("plain", plain))
            ]
            try:
                async with httpx.AsyncClient(timeout=300) as client:
                    urls = [f"http://127.0.0.1:{port}" for port in (ours, theirs)]
                    for url, name in zip(urls, ("gateway", "plain"), strict=True):
                        await _until_healthy(client, url, Path(folder) / f"{name}.log")
                    places = asyncio.Semaphore(_AT_ONCE)
                    with Progress(disable=not sys.stderr.isatty(), transient=True) as progress:
                        bar = progress.add_task("requests", total=len(seeds))

                        async def compare(seed: int) -> None:
                            request = drawn(seed)
                            async with places:
                                mine, yours = [await _ask(client, url, request) for url in urls]
                            found = differences(request, mine, yours)
                            reason = explained(request, mine, yours) if found else ""
                            if reason:
                                reasons[reason] += 1
                            elif found:
                                unexplained[seed] = found
                            progress.advance(bar)

                        await asyncio.gather(*map(compare, seeds))
            finally:
                for process in processes:
                    child_process.stop(process, 20)
    return dict(sorted(unexplained.items())), reasons


async def _until_healthy(client: httpx.AsyncClient, url: str, log: Path) -> None:
    until_s = monotonic_s() + _START_S
    while monotonic_s() < until_s:
        try:
            if (await client.get(f"{url}/health")).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.5)
    raise StartError(f"{url} did not come up: {log.read_text()[-2000:]}")


async def _ask(client: httpx.AsyncClient, url: str, request: Request) -> Answer:
    response = await client.post(url + request.path, json=request.body)
    kind = response.headers.get("content-type", "").partition(";")[0]
    return Answer(response.status_code, kind, response.text)


if __name__ == "__main__":
    sys.exit(main())
