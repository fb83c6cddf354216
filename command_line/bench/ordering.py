"""The options of `rachis bench ordering`; ordering_run.py does the work."""

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command("ordering")(ordering_command)


def ordering_command(as_json: options.AsJson = False) -> None:
    """Time that each policy takes to order 10, 50 and 500 sessions."""
    from command_line.bench import ordering_run

    ordering_run.bench_ordering(as_json=as_json)
