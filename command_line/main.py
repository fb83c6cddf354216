"""The `rachis` command: collects what its modules register, in the order of `rachis --help`, and runs it."""

import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Annotated

import grpc
import typer

from cluster_core import versions
from cluster_core.errors import RachisError
from command_line import (
    adapters,
    chaos,
    chat,
    cluster,
    config,
    demo,
    gateway,
    generate,
    index,
    keys,
    logs,
    placement,
    pools,
    profile,
    route,
    serve,
    trace,
    verify,
)
from command_line.batches import batch
from command_line.bench import group as bench
from command_line.doctor import doctor
from command_line.errors import INTERRUPTED_EXIT_CODE, first_leaf, report_error
from command_line.output import out
from command_line.simulation import plan, simulate
from command_line.status import overview
from command_line.top import top

COMMANDS = (
    serve,
    route,
    gateway,
    generate,
    chat,
    batch,
    overview,
    top,
    doctor,
    trace,
    logs,
    pools,
    demo,
    verify,
    chaos,
    profile,
    simulate,
    plan,
)
GROUPS = (config, bench, index, placement, adapters, keys, cluster)

app = typer.Typer(
    name="rachis",
    help="Disaggregated prefill and decode for large language models.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def options_of_all(
    version: Annotated[bool, typer.Option("--version", help="Show the versions that this command runs with.")] = False,
) -> None:
    if version:
        out.print(str(versions.installed()))
        raise typer.Exit


for module in (*COMMANDS, *GROUPS):
    module.register(app)


def run() -> None:
    """Console script. User errors exit 2, operating faults 1, both with one sentence on standard error. A character
    that a terminal's encoding lacks is shown as another."""
    for stream in (sys.stdout, sys.stderr):
        # A process may be started without one of them.
        if isinstance(stream, TextIOWrapper):
            # It looks where it stands, which one that has become a pipe since it was opened does not know.
            with suppress(OSError, ValueError):
                stream.reconfigure(errors="replace")
    try:
        app()
    except (RachisError, grpc.aio.AioRpcError) as error:
        sys.exit(report_error(error))
    except BaseExceptionGroup as group:
        # Of calls that ran side by side, the first that failed speaks for all.
        first = first_leaf(group)
        if not isinstance(first, RachisError | grpc.aio.AioRpcError):
            raise
        sys.exit(report_error(first))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)


if __name__ == "__main__":
    run()
