"""Where a router listens, by its configuration: administration apart from prompts wherever these leave loopback."""

import ipaddress
from dataclasses import dataclass

from cluster_configs.schema import RouterSection

# Of administration, where it is apart and nothing else is configured.
ADMIN_PORT = 7422


@dataclass(frozen=True, slots=True)
class Listening:
    """port: 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


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


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
