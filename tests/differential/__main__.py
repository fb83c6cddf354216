"""`python -m tests.differential`: a service with a gateway and `vllm serve` of the same model, asked the same."""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from cluster_configs.loading import load
from cluster_configs.schema import ModelSection
from cluster_core.clock import monotonic_s
from cluster_core.errors import StartError
from cluster_core.ports import hold_port
from command_line.output import out, print_json
from command_line.own_service import target_service
from control_plane.service import child_process
from control_plane.service.state import StateFile
from tests.differential.compare import Answer, differences, explained
from tests.differential.requests import MODEL, Request, drawn

_START_S = 300.0
_AT_ONCE = 4
# As engines here have it. With vLLM's `auto` one schema that xgrammar does not take makes guidance the compiler of all
# that come later, and strict tools end with 500 from then on.
STRUCTURED_OUTPUTS_BACKEND = "xgrammar"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tool-call-parser", default="hermes")
    parser.add_argument("--reasoning-parser", help="of both; none by default")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    options = f"--enable-auto-tool-choice --tool-call-parser {given.tool_call_parser}"
    options += f" --reasoning-parser {given.reasoning_parser}" if given.reasoning_parser else ""
    tally = asyncio.run(_compared(range(given.seed, given.seed + given.requests), options))
    if given.json:
        print_json(tally.as_json())
    else:
        for seed, found in sorted(tally.unexplained.items()):
            out.print("\n    ".join([f"seed {seed}: {drawn(seed)}", *found[:8]]), markup=False)
        for reason, count in tally.explained.most_common():
            out.print(f"{count} times explained: {reason}")
        out.print(f"{tally.statuses.total()} requests, by status: {dict(tally.statuses)}")
        out.print(f"{len(tally.unexplained)} unexplained differences")
    return 1 if tally.unexplained else 0


@dataclass(slots=True)
class Tally:
    """unexplained: differences by seed. statuses: of the service's answers."""

    unexplained: dict[int, list[str]] = field(default_factory=dict)
    explained: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)

    def add(self, seed: int, request: Request, ours: Answer, theirs: Answer) -> None:
        self.statuses[ours.status] += 1
        found = differences(request, ours, theirs)
        reason = explained(request, ours, theirs) if found else ""
        if reason:
            self.explained[reason] += 1
        elif found:
            self.unexplained[seed] = found

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.statuses.total(),
            "unexplained": len(self.unexplained),
            "explained": dict(self.explained),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "differences": {str(seed): found for seed, found in sorted(self.unexplained.items())},
        }


async def _compared(seeds: range, options: str) -> Tally:
    tally, places = Tally(), asyncio.Semaphore(_AT_ONCE)
    with tempfile.TemporaryDirectory(prefix="rachis-differential-") as folder:
        async with _both(Path(folder), options) as (ours, theirs), httpx.AsyncClient(timeout=300) as client:
            with Progress(disable=not sys.stderr.isatty(), transient=True) as progress:
                bar = progress.add_task("requests", total=len(seeds))

                async def compare(seed: int) -> None:
                    request = drawn(seed)
                    async with places:
                        tally.add(seed, request, await _ask(client, ours, request), await _ask(client, theirs, request))
                        progress.advance(bar)

                await asyncio.gather(*map(compare, seeds))
    return tally


@asynccontextmanager
async def _both(folder: Path, options: str) -> AsyncIterator[tuple[str, str]]:
    """URLs of a gateway and of `vllm serve`, which end with this. options: of both."""
    model, longest = ModelSection().resolved_path, str(load().config.engine.max_model_len)
    async with target_service(None, StateFile(folder / "state.json"), load(), always_own=True) as target:
        ports = {"gateway": hold_port("127.0.0.1"), "plain": hold_port("127.0.0.1")}
        commands = {
            "gateway": f"command_line.main gateway --address {target.address} {options}",
            "plain": f"vllm.entrypoints.launchers.api_server.entry --model {model} --served-model-name {MODEL} "
            f"--max-model-len {longest} --dtype float32 --enforce-eager --kv-cache-memory-bytes 500000000 "
            f"--structured-outputs-config.backend {STRUCTURED_OUTPUTS_BACKEND} {options}",
        }
        processes = [
            child_process.start_bound(
                [sys.executable, "-m", *command.split(), "--port", str(ports[name])], folder / f"{name}.log"
            )
            for name, command in commands.items()
        ]
        try:
            urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
            for name, url in urls.items():
                await _until_healthy(url, folder / f"{name}.log")
            yield urls["gateway"], urls["plain"]
        finally:
            for process in processes:
                child_process.stop(process, 20)


async def _until_healthy(url: str, log: Path) -> None:
    until_s = monotonic_s() + _START_S
    async with httpx.AsyncClient() as client:
        while monotonic_s() < until_s:
            try:
                if (await client.get(f"{url}/health")).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                # It does not listen yet.
                await asyncio.sleep(0.5)
    told = await asyncio.to_thread(log.read_text)
    raise StartError(f"{url} did not come up: {told[-2000:]}")


async def _ask(client: httpx.AsyncClient, url: str, request: Request) -> Answer:
    response = await client.post(url + request.path, json=request.body)
    kind = response.headers.get("content-type", "").partition(";")[0]
    return Answer(response.status_code, kind, response.text)


if __name__ == "__main__":
    sys.exit(main())
