"""`rachis status --ready`: whether requests are taken, for what watches a process, such as a container's health check.

A router says so by gRPC's health service, a gateway by `/health`. Neither asks for a key, so that a health check needs
none.
"""

import asyncio

from rachis import AsyncClient

from command_line.output import out, print_json
from command_line.own_pages import TIMEOUT_S, UNREAD, page_of
from control_plane.service.state import StateFile


async def ready(address: str | None, state_file: StateFile, *, as_json: bool) -> int:
    """Says it; returns 0 where requests are taken, else 1.

    address: host:port of a router, or a gateway's URL; None: the service that runs here. Raises InvalidInputError for
    an address that is none.
    """
    running = state_file.read()
    address = address or (running.admin_address if running else None)
    if not address:
        is_ready = False
        sentence = "a service is starting" if running else "no service runs here; others are asked with --address"
    elif address.startswith(("http://", "https://")):
        is_ready, sentence = await _of_gateway(address)
    else:
        is_ready, sentence = await _of_router(address)
    if as_json:
        print_json({"ready": is_ready, "address": address or "", "sentence": sentence})
    else:
        out.print(sentence, markup=False)
    return 0 if is_ready else 1


async def _of_router(address: str) -> tuple[bool, str]:
    async with AsyncClient(address) as client:
        if await client.is_serving(TIMEOUT_S):
            return True, f"{address} takes requests"
    return False, f"{address} does not answer, or has no worker to give requests to"


async def _of_gateway(url: str) -> tuple[bool, str]:
    try:
        await asyncio.to_thread(page_of, f"{url.rstrip('/')}/health", TIMEOUT_S)
    except UNREAD as error:
        return False, f"{url} takes no requests: {error}"
    return True, f"{url} takes requests"
