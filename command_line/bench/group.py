"""`rachis bench`: collects its commands, in the order of `rachis bench --help`."""

import typer

from command_line.bench import (
    cht,
    data_path,
    decode_locality,
    encryption,
    feather,
    gateway,
    host_copies,
    hostile,
    index,
    migration,
    ordering,
    overhead,
    pace,
    placement,
    prefix_cache,
    roles,
    serve,
    simulator,
    soak,
    streaming,
    system,
    telemetry,
    tenants,
    tiers,
)

COMMANDS = (
    overhead,
    data_path,
    telemetry,
    encryption,
    pace,
    host_copies,
    gateway,
    serve,
    simulator,
    ordering,
    streaming,
    prefix_cache,
    feather,
    tiers,
    cht,
    index,
    migration,
    placement,
    system,
    decode_locality,
    roles,
    hostile,
    soak,
    tenants,
)


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measured comparisons.", no_args_is_help=True)
    for module in COMMANDS:
        module.register(bench)
    app.add_typer(bench, name="bench")
