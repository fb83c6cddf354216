"""`python -m tests.structured`: grammars through a service of its own, and through one plain vLLM."""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rachis import AsyncClient
from rachis.v1 import worker_pb2 as wire
from rich.progress import Progress

from benchmarks.direct_call import DirectWorker
from benchmarks.plain_engine import GENERATION, plain_engine
from cluster_configs.loading import LoadedConfig, load
from command_line.output import out, print_json
from command_line.own_service import target_service
from control_plane.service.state import StateFile
from tests.structured.compared import Tally, compared


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structured", description=__doc__)
    parser.add_argument("--grammars", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kills", type=int, default=0, help="Decode workers that are killed meanwhile, in turn, of two."
    )
    parser.add_argument("--blocks", type=int, help="Of each worker; few, and requests are preempted.")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    flags: dict[str, object] = {"placement.disaggregation": "always"}
    flags |= {"pools.decode.workers": 2} if given.kills else {}
    flags |= {"engine.kv_blocks": given.blocks, "engine.max_model_len": 2048} if given.blocks else {}
    seeds = range(given.seed, given.seed + given.grammars)
    tally = asyncio.run(_tally(seeds, load(flags=flags), given.kills))
    if given.json:
        print_json(tally.as_json())
    else:
        out.print("\n".join(tally.problems), markup=False)
        out.print({name: value for name, value in tally.as_json().items() if name != "problems"})
    return 1 if tally.problems else 0


async def _tally(seeds: range, loaded: LoadedConfig, kills: int) -> Tally:
    with tempfile.TemporaryDirectory(prefix="rachis-structured-") as folder:
        async with (
            target_service(None, StateFile(Path(folder) / "state.json"), loaded, always_own=True) as target,
            plain_engine(loaded.config) as (plain_address, _),
            AsyncClient(target.address) as cluster,
        ):
            plain = DirectWorker(plain_address, GENERATION)
            done = 0
            with Progress(disable=not sys.stderr.isatty(), transient=True) as progress:
                bar = progress.add_task("grammars", total=len(seeds))

                def on_done() -> None:
                    nonlocal done
                    done += 1
                    progress.advance(bar)

                killing = asyncio.create_task(_kill(cluster, kills, len(seeds), lambda: done))
                try:
                    return await compared(seeds, cluster, plain, on_done)
                finally:
                    killing.cancel()
                    await plain.close()


async def _kill(cluster: AsyncClient, kills: int, grammars: int, done: Callable[[], int]) -> None:
    """A decode worker that has work, each time so many more are done."""
    for number in range(kills):
        while done() < (number + 1) * grammars // (kills + 1):  # noqa: ASYNC110 - of a count
            await asyncio.sleep(0.05)
        while True:
            views = await cluster.workers()
            decode = [view for view in views if view.registration.pool == wire.POOL_DECODE]
            busy = [view for view in decode if view.in_flight_requests]
            if busy and len(decode) > 1:
                os.kill(busy[0].registration.pid, signal.SIGKILL)
                break
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
