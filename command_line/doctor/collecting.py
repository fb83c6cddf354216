"""Sees a service: asks its router, looks around it, sends the probes. What cannot be seen is noted with the reason."""

import asyncio
import json
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc
from pydantic import ValidationError
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin

from cluster_configs.loading import tree_of
from cluster_configs.schema import RachisConfig
from cluster_core import versions
from cluster_core.clock import unix_s
from command_line.doctor import probing, surroundings
from command_line.doctor.seen import Part, Seen
from command_line.router_admin import TIMEOUT_S

T = TypeVar("T")


async def look(address: str) -> Seen:
    """All that the checks judge. Raises AioRpcError where the router does not tell its status and its workers."""
    async with AsyncClient(address) as client:
        router, workers = await asyncio.gather(client.router_status(), client.workers())
        seen = Seen(now_unix_s=unix_s(), here=versions.installed(), router=router, workers=workers)
        seen = await _with_configuration(client, await _with_answers(client, seen))
        seen = await surroundings.added(address, seen)
        seen = await probing.added(client, seen)
        later, views = await asyncio.gather(client.router_status(), client.workers())
    return replace(seen, later=views, waiting_requests=min(_waiting(router, workers), _waiting(later, views)))


async def _with_answers(client: AsyncClient, seen: Seen) -> Seen:
    """What the admin service tells beside status and workers."""
    missing = dict(seen.missing)

    async def told(part: Part, call: Awaitable[T], nothing: T) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            missing[part] = f"the router does not tell: {error.code().name}: {error.details()}"
            return nothing

    ask, limit = client.admin, TIMEOUT_S
    index = told(
        Part.INDEX, ask.GetIndexStatus(admin.GetIndexStatusRequest(), timeout=limit), admin.GetIndexStatusResponse()
    )
    claims = told(Part.CLAIMS, ask.CheckIndex(admin.CheckIndexRequest(), timeout=limit), admin.CheckIndexResponse())
    pools = told(Part.POOLS, ask.GetPools(admin.GetPoolsRequest(), timeout=limit), admin.GetPoolsResponse())
    adapters = told(
        Part.ADAPTERS, ask.ListAdapters(admin.ListAdaptersRequest(), timeout=limit), admin.ListAdaptersResponse()
    )
    answers = await asyncio.gather(index, claims, pools, adapters)
    if not answers[2].pools:
        missing.setdefault(Part.POOLS, "the controller of the pools does not run with this router")
    return replace(
        seen,
        index=answers[0],
        claims=answers[1].workers,
        pools=answers[2].pools,
        adapters=answers[3].adapters,
        missing=missing,
    )


async def _with_configuration(client: AsyncClient, seen: Seen) -> Seen:
    """That in force at the router. One of another version may have keys that are not known here."""
    try:
        told = await client.admin.GetEffectiveConfig(admin.GetEffectiveConfigRequest(), timeout=TIMEOUT_S)
        config = RachisConfig.model_validate(tree_of({entry.key: json.loads(entry.value) for entry in told.entries}))
    except grpc.aio.AioRpcError as error:
        return seen.without(Part.CONFIGURATION, f"the router does not tell its configuration: {error.details()}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        return seen.without(
            Part.CONFIGURATION,
            f"the configuration of the router, version {seen.router.version}, is not known here: {key}: {first['msg']}",
        )
    return replace(seen, config=config, sources={entry.key: entry.source for entry in told.entries})


def _waiting(router: admin.GetRouterStatusResponse, workers: Sequence[admin.WorkerView]) -> int:
    return router.queued_requests + sum(view.load.waiting_requests for view in workers)
