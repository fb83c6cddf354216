"""The options of `rachis bench host-copies`; host_copies_run.py does the work."""

from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("host-copies")(host_copies_command)


def host_copies_command(
    mebibytes: Annotated[int, typer.Option(min=1, max=8192, help="That a round copies.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, max=1000)] = 9,
    as_json: options.AsJson = False,
) -> None:
    """GB/s of KV blocks between device and host memory, beside one copy of as many bytes."""
    from command_line.bench import host_copies_run

    host_copies_run.bench_host_copies(mebibytes << 20, rounds, as_json=as_json)
