"""What each call and each HTTP route needs, as literal tables; `docs/access.md` is written from them.

What stands in no table needs `operate`: a route that a new version of vLLM's front brings is not open to everybody.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from control_plane.model.limits import MAX_PRIORITY


class Role(StrEnum):
    """What a key may be given."""

    # Prompts and sessions.
    GENERATE = "generate"
    # What runs, what is in force, why requests go where they go.
    OBSERVE = "observe"
    # All of `observe`, and changing it.
    OPERATE = "operate"


class Need(StrEnum):
    """What a call asks of its caller: nothing, any key, or one with a role."""

    NOTHING = "nothing"
    KEY = "any key"
    GENERATE = "generate"
    OBSERVE = "observe"
    OPERATE = "operate"


RPC_NEEDS = {
    "/rachis.v1.RouterService/Generate": Need.GENERATE,
    "/rachis.v1.RouterService/Resume": Need.GENERATE,
    "/rachis.v1.RouterService/StreamGenerate": Need.GENERATE,
    "/rachis.v1.RouterService/GetIdentity": Need.KEY,
    "/rachis.v1.RouterService/ListModels": Need.KEY,
    "/rachis.v1.AdminService/ListWorkers": Need.OBSERVE,
    "/rachis.v1.AdminService/DrainWorker": Need.OPERATE,
    "/rachis.v1.AdminService/ResumeWorker": Need.OPERATE,
    "/rachis.v1.AdminService/GetPools": Need.OBSERVE,
    "/rachis.v1.AdminService/ScalePools": Need.OPERATE,
    "/rachis.v1.AdminService/RemoveWorker": Need.OPERATE,
    "/rachis.v1.AdminService/RestartWorkers": Need.OPERATE,
    "/rachis.v1.AdminService/GetEffectiveConfig": Need.OBSERVE,
    "/rachis.v1.AdminService/GetRouterStatus": Need.OBSERVE,
    "/rachis.v1.AdminService/GetOverview": Need.OBSERVE,
    "/rachis.v1.AdminService/WatchOverview": Need.OBSERVE,
    "/rachis.v1.AdminService/GetHistory": Need.OBSERVE,
    "/rachis.v1.AdminService/GetHottestPrefixes": Need.OBSERVE,
    "/rachis.v1.AdminService/LookupPrefix": Need.OBSERVE,
    "/rachis.v1.AdminService/ExplainPlacement": Need.OBSERVE,
    "/rachis.v1.AdminService/ListPlacements": Need.OBSERVE,
    "/rachis.v1.AdminService/GetTrace": Need.OBSERVE,
    "/rachis.v1.AdminService/ListRequests": Need.OBSERVE,
    "/rachis.v1.AdminService/CheckIndex": Need.OBSERVE,
    "/rachis.v1.AdminService/GetIndexStatus": Need.OBSERVE,
    # Of all tenants' requests.
    "/rachis.v1.AdminService/GetLogs": Need.OPERATE,
    "/rachis.v1.AdminService/ListAdapters": Need.OBSERVE,
    "/rachis.v1.AdminService/LoadAdapter": Need.OPERATE,
    "/rachis.v1.AdminService/UnloadAdapter": Need.OPERATE,
    "/grpc.health.v1.Health/Check": Need.NOTHING,
    "/grpc.health.v1.Health/Watch": Need.NOTHING,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Need.KEY,
}
# They tell until whoever called leaves: that the caller may still listen is asked again and again.
ENDLESS_RPCS = {"/rachis.v1.AdminService/WatchOverview"}

# Of a gateway, by the path; what stands in braces is any text without a slash.
HTTP_NEEDS = {
    "/health": Need.NOTHING,
    "/version": Need.KEY,
    "/openapi.json": Need.KEY,
    "/docs": Need.KEY,
    "/docs/oauth2-redirect": Need.KEY,
    "/redoc": Need.KEY,
    "/v1/models": Need.KEY,
    "/tokenize": Need.GENERATE,
    "/detokenize": Need.GENERATE,
    "/v1/chat/completions": Need.GENERATE,
    "/v1/chat/completions/batch": Need.GENERATE,
    "/v1/completions": Need.GENERATE,
    "/v1/responses": Need.GENERATE,
    "/v1/responses/{id}": Need.GENERATE,
    "/v1/responses/{id}/cancel": Need.GENERATE,
    "/v1/messages": Need.GENERATE,
    "/v1/messages/count_tokens": Need.GENERATE,
    "/generative_scoring": Need.GENERATE,
    "/metrics": Need.OBSERVE,
    "/load": Need.OBSERVE,
    "/kv_event_sources": Need.OBSERVE,
}
# Of a router's own port, where `security.metrics_need_key` says so; otherwise nothing.
METRICS_NEEDS = {"/metrics": Need.OBSERVE, "/livez": Need.NOTHING, "/readyz": Need.NOTHING}
_IN_BRACES = re.compile(r"\\{\w+\\}")
_PATHS = [(re.compile(_IN_BRACES.sub("[^/]+", re.escape(path))), need) for path, need in HTTP_NEEDS.items()]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls. tenant: whose cached prefixes these are. lowest_priority: that requests may ask for."""

    name: str
    tenant: str
    roles: frozenset[Role]
    lowest_priority: int

    def may(self, need: Need) -> bool:
        if need in (Need.NOTHING, Need.KEY):
            return True
        return need.value in self.roles or (need is Need.OBSERVE and Role.OPERATE in self.roles)

    def lacks(self, need: Need) -> str:
        """The sentence for who may not do what needs this."""
        return f"this needs the role `{need}`; the key `{self.name}` has {', '.join(sorted(self.roles)) or 'none'}"


# Of a service without keys.
ANYBODY = Identity("anybody", "", frozenset(Role), -MAX_PRIORITY)
# Processes of the service itself.
SERVICE = Identity("service", "", frozenset({Role.OBSERVE}), 0)


def need_of_rpc(method: str) -> Need:
    """method: as gRPC calls it, `/package.Service/Method`."""
    return RPC_NEEDS.get(method, Need.OPERATE)


def need_of_route(path: str) -> Need:
    """path: without a query."""
    asked = path.rstrip("/")
    return next((need for pattern, need in _PATHS if pattern.fullmatch(asked)), Need.OPERATE)
