"""Where a router listens: administration stays on loopback, whatever prompts do."""

from typing import Any

import pytest

from cluster_configs.listening import administration_of, is_loopback, metrics_of, own_ports
from cluster_configs.loading import load
from cluster_configs.schema import RouterSection
from cluster_core.errors import ConfigError


def router(**settings: Any) -> RouterSection:
    return load(flags={f"router.{key}": value for key, value in settings.items()}).config.router


@pytest.mark.parametrize(
    ("settings", "administration"),
    [
        ({}, None),
        ({"host": "::1", "admin_host": "localhost"}, None),
        ({"host": "0.0.0.0"}, "127.0.0.1:7422"),
        ({"host": "10.0.0.7", "port": 7000}, "127.0.0.1:7422"),
        ({"admin_host": "10.0.0.7"}, "10.0.0.7:7422"),
        ({"admin_port": 0}, "127.0.0.1:0"),
        ({"admin_port": 7500, "admin_host": "10.0.0.7", "host": "0.0.0.0"}, "10.0.0.7:7500"),
        ({"admin_host": "::1", "host": "::"}, "[::1]:7422"),
        ({"admin_host": "[fd00::7]"}, "[fd00::7]:7422"),
    ],
)
def test_administration_is_apart_once_prompts_leave_loopback_or_it_is_told_to(
    settings: dict[str, Any], administration: str | None
) -> None:
    found = administration_of(router(**settings))
    assert (str(found) if found is not None else None) == administration


def test_metrics_listen_beside_prompts_unless_told_otherwise() -> None:
    assert str(metrics_of(router(host="0.0.0.0", metrics_port=9421))) == "0.0.0.0:9421"
    assert str(metrics_of(router(host="0.0.0.0", metrics_host="127.0.0.1", metrics_port=9421))) == "127.0.0.1:9421"


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("[::1]", True), ("localhost", True), ("10.0.0.1", False), ("x", False)],
)
def test_what_is_loopback(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it


@pytest.mark.parametrize(
    ("section", "ports"),
    [
        ({}, [(7422, 0), (7423, 0), (7424, 0)]),
        ({"admin_port": 0, "metrics_port": 9421}, [(0, 9421), (0, 9422), (0, 9423)]),
        ({"admin_port": 65_533}, [(65_533, 0), (65_534, 0), (65_535, 0)]),
    ],
)
def test_routers_behind_one_port_have_ports_of_their_own_one_after_the_other(
    section: dict[str, Any], ports: list[tuple[int, int]]
) -> None:
    made = [own_ports(RouterSection(**section), number, 3) for number in range(3)]
    assert [(each["admin_port"], each["metrics_port"]) for each in made] == ports


def test_more_routers_than_there_are_ports_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"router.metrics_port: must be at most 65533 for 3 processes, got 65534"):
        own_ports(RouterSection(metrics_port=65_534), 0, 3)


@pytest.mark.parametrize("section", [{"port": 0, "admin_port": 0}, {"admin_port": None}])
def test_a_port_is_shared_by_routers_whose_administration_is_their_own(section: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="share_port needs a port, and an admin_port"):
        RouterSection(share_port=True, **section)
