"""`rachis bench gateway`: what HTTP adds to gRPC, by one gateway process and by two."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rachis import AsyncClient
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.gateway import CONCURRENCIES, WARM_UP, GatewayBenchmark
from cluster_configs.loading import LoadedConfig
from cluster_configs.schema import GatewaySection
from command_line.output import err, out, print_json, print_table
from command_line.own_service import target_service
from control_plane.service.gateways import GatewayLogs, Gateways
from control_plane.service.state import StateFile

_PROCESSES = (1, 2)


async def bench_gateway(loaded: LoadedConfig, state_file: StateFile, requests: int, *, as_json: bool) -> None:
    """Always on an own service, so that nobody else's requests are in the figures."""
    tables: dict[int, dict[str, dict[str, float]]] = {}
    async with (
        target_service(None, state_file, loaded, always_own=True) as target,
        AsyncClient(target.address) as cluster,
    ):
        with Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err,
            # Drawing takes the interpreter from the client that is being timed.
            refresh_per_second=1, disable=not err.is_terminal,
        ) as progress:  # fmt: skip
            each = 2 * (WARM_UP + len(CONCURRENCIES) * requests)
            task = progress.add_task("requests", total=len(_PROCESSES) * each)
            for processes in _PROCESSES:
                async with _gateways(target.address, processes) as gateways:
                    async with asyncio.timeout(loaded.config.limits.start_timeout_s):
                        await gateways.processes.all_up()
                        url = await gateways.first_url()
                    benchmark = GatewayBenchmark(cluster, url, gateways.processes.pids, lambda: progress.advance(task))
                    measured = await benchmark.run(requests)
                tables[processes] = {str(number): result.table() for number, result in measured.items()}
    one = tables[_PROCESSES[0]]
    result: dict[str, Any] = {
        "added_p50_ms": one["1"]["added_p50_ms"],
        "cpu_us_per_token": one[str(CONCURRENCIES[-1])]["cpu_us_per_token"],
        "requests": requests,
        "by_processes": {str(number): table for number, table in tables.items()},
    }
    if as_json:
        print_json(result)
        return
    columns = [(processes, number) for processes, table in tables.items() for number in table]
    print_table(
        "", ("", *(f"{processes} process{'es' * (processes > 1)}, {number} at once" for processes, number in columns)),
        [(name, *(tables[processes][number][name] for processes, number in columns)) for name in one["1"]],
    )  # fmt: skip
    out.print(f"{requests} requests a cell and side")


@asynccontextmanager
async def _gateways(router: str, processes: int) -> AsyncIterator[Gateways]:
    with tempfile.TemporaryDirectory(prefix="rachis-gateways-") as folder:
        gateways = Gateways(GatewaySection(port=0, processes=processes), router, GatewayLogs(Path(folder), ""))
        gateways.start()
        try:
            yield gateways
        finally:
            await gateways.stop()
