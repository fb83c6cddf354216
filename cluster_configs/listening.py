"""Where a router listens, by its configuration: administration apart from prompts wherever these leave loopback."""

import ipaddress
from dataclasses import dataclass

from cluster_configs.schema import RouterSection
from cluster_core.errors import ConfigError
from cluster_core.ports import address_of

# Of administration, where it is apart and nothing else is configured.
ADMIN_PORT = 7422
_MOST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Listening:
    """port: 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return address_of(self.host, self.port)


def prompts_of(section: RouterSection) -> Listening:
    """Where prompts and sessions are answered."""
    return Listening(section.host, section.port)


def administration_of(section: RouterSection) -> Listening | None:
    """Where administration is answered; None: at the door of prompts and sessions, which is on loopback then."""
    if section.admin_port is not None:
        return Listening(section.admin_host, section.admin_port)
    if is_loopback(section.host) and is_loopback(section.admin_host):
        return None
    return Listening(section.admin_host, ADMIN_PORT)


def metrics_of(section: RouterSection) -> Listening:
    """Where metrics, probes and the console are answered."""
    return Listening(section.metrics_host or section.host, section.metrics_port)


def own_ports(section: RouterSection, number: int, routers: int) -> dict[str, int]:
    """Of the router with this number among those on one port: for administration and for metrics one after the other; 0
    where `section` wants a free one. Raises ConfigError where there are not so many."""
    admin_port = ADMIN_PORT if section.admin_port is None else section.admin_port
    first = {"admin_port": admin_port, "metrics_port": section.metrics_port}
    for name, port in first.items():
        if port + routers - 1 > _MOST_PORT:
            sentence = f"must be at most {_MOST_PORT + 1 - routers} for {routers} processes, got {port}"
            raise ConfigError(sentence, field=f"router.{name}")
    return {name: port and port + number for name, port in first.items()}


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
