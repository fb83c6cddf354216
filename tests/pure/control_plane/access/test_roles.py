"""What needs what: every method of our services has a row, and what has none is for operators."""

import pytest
from rachis.v1 import admin_pb2, router_pb2

from control_plane.access.roles import ANYBODY, RPC_NEEDS, SERVICE, Identity, Need, Role, need_of_route, need_of_rpc


def _identity(*roles: Role) -> Identity:
    return Identity("k", "t", frozenset(roles), 0)


def test_every_method_of_our_services_has_a_row_and_no_other() -> None:
    services = [
        service for file in (router_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR) for service in file.services_by_name.values()
    ]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods == {method for method in RPC_NEEDS if method.startswith("/rachis.")}


@pytest.mark.parametrize(
    ("roles", "may"),
    [
        ((), {Need.NOTHING, Need.KEY}),
        ((Role.GENERATE,), {Need.NOTHING, Need.KEY, Need.GENERATE}),
        ((Role.OBSERVE,), {Need.NOTHING, Need.KEY, Need.OBSERVE}),
        ((Role.OPERATE,), {Need.NOTHING, Need.KEY, Need.OBSERVE, Need.OPERATE}),
    ],
)
def test_a_role_may_do_this_and_nothing_else(roles: tuple[Role, ...], may: set[Need]) -> None:
    assert {need for need in Need if _identity(*roles).may(need)} == may


def test_anybody_may_do_everything_and_the_service_may_look() -> None:
    assert all(ANYBODY.may(need) for need in Need)
    assert {need for need in Need if SERVICE.may(need)} == {Need.NOTHING, Need.KEY, Need.OBSERVE}


def test_what_has_no_row_is_for_operators() -> None:
    assert need_of_rpc("/rachis.v1.AdminService/Erase") is Need.OPERATE
    assert need_of_route("/sleep") is Need.OPERATE


@pytest.mark.parametrize(
    ("path", "need"),
    [
        ("/health", Need.NOTHING),
        ("/health/", Need.NOTHING),
        ("/v1/completions", Need.GENERATE),
        ("/v1/responses/resp_1", Need.GENERATE),
        ("/v1/responses/resp_1/cancel", Need.GENERATE),
        ("/metrics", Need.OBSERVE),
        ("/metrics/x", Need.OPERATE),
        ("/v1/responses/a/b", Need.OPERATE),
        ("/health/../v1/models", Need.OPERATE),
        ("/healthy", Need.OPERATE),
        ("//health", Need.OPERATE),
        ("/", Need.OPERATE),
    ],
)
def test_a_path_needs(path: str, need: Need) -> None:
    assert need_of_route(path) is need
