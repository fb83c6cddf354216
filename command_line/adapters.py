"""`rachis adapters`: the LoRA adapters of a running service, listed, loaded and unloaded."""

import asyncio
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin

from command_line import options
from command_line.output import err, out, print_json, print_table
from command_line.router_admin import TIMEOUT_S

# A worker gives up after 120 s.
_LOAD_TIMEOUT_S = 180.0
_DIGEST_CHARACTERS = 8

Name = Annotated[str, typer.Argument(help="Which requests ask for as their model.")]


def register(app: typer.Typer) -> None:
    adapters = typer.Typer(help="LoRA adapters, which requests name as their model.", no_args_is_help=True)
    adapters.command("list")(list_command)
    adapters.command("load")(load_command)
    adapters.command("unload")(unload_command)
    app.add_typer(adapters, name="adapters")


def list_command(address: options.Address = None, as_json: options.AsJson = False) -> None:
    """Which there are, and which workers have them loaded."""
    asyncio.run(show(options.admin_address(address), as_json=as_json))


def load_command(
    name: Name,
    path: Annotated[str, typer.Argument(help="A folder with adapter_config.json, on the hosts of all workers.")],
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Have every worker load an adapter, and serve it."""
    asyncio.run(load(options.admin_address(address), name, path, as_json=as_json))


def unload_command(name: Name, address: options.Address = None, as_json: options.AsJson = False) -> None:
    """Serve an adapter no more; requests that use it go on to their end."""
    asyncio.run(unload(options.admin_address(address), name, as_json=as_json))


async def show(address: str, *, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        response = await client.admin.ListAdapters(admin.ListAdaptersRequest(), timeout=TIMEOUT_S)
    if as_json:
        print_json(MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    if not response.max_adapters:
        out.print("The service takes no adapters: `lora.max_loaded` is 0.")
        return
    title = f"{len(response.adapters)} of at most {response.max_adapters} adapters of {response.model}"
    rows = [
        (view.adapter.name, view.adapter.digest[:_DIGEST_CHARACTERS], view.adapter.path, ", ".join(view.worker_ids))
        for view in response.adapters
    ]
    print_table(title, ("name", "digest", "path", "loaded at"), rows)


async def load(address: str, name: str, path: str, *, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        request = admin.LoadAdapterRequest(name=name, path=path)
        response = await client.admin.LoadAdapter(request, timeout=_LOAD_TIMEOUT_S)
    if as_json:
        print_json(MessageToDict(response, preserving_proto_field_name=True))
        return
    out.print(f"{name} is served; loaded at {', '.join(response.worker_ids)}", markup=False)


async def unload(address: str, name: str, *, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        request = admin.UnloadAdapterRequest(name=name)
        response = await client.admin.UnloadAdapter(request, timeout=TIMEOUT_S)
    if as_json:
        print_json({"name": name, "left_at": list(response.left_at)})
        return
    out.print(f"{name} is served no more", markup=False)
    if response.left_at:
        err.print(f"still in memory at {', '.join(response.left_at)}, until a place is needed", markup=False)
