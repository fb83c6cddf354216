"""The options of `rachis doctor`; doctor_run.py does the work."""

import asyncio

import typer

from command_line import options


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor_command)


def doctor_command(address: options.Address = None, as_json: options.AsJson = False) -> None:
    """Say what is wrong with a running service, and which page helps; exit code 1 with findings."""
    # Imported here: it brings what few commands need.
    from command_line.doctor import doctor_run

    raise typer.Exit(asyncio.run(doctor_run.doctor(options.admin_address(address), as_json=as_json)))
