"""Where a service is to listen on its host: whether these places are free, and how commands there reach them."""

import socket
from urllib.parse import urlsplit

from cluster_configs.listening import Listening, administration_of, prompts_of
from cluster_configs.schema import RachisConfig
from cluster_core.errors import StartError
from cluster_core.ports import address_of, family_of

# What listens on all addresses, and by which of them it is reached.
_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def check_free(config: RachisConfig) -> None:
    """Before anything slow is started. Raises StartError."""
    wanted = {"router.port": prompts_of(config.router), "router.admin_port": administration_of(config.router)}
    if config.gateway.port is not None:
        wanted["gateway.port"] = Listening(config.gateway.host, config.gateway.port)
    for field, at in wanted.items():
        if at is None:
            continue
        # As servers listen there: on all addresses of the host, those of IPv4 are among them.
        is_of_both = at.host == "::" and socket.has_dualstack_ipv6()
        try:
            with socket.create_server((at.host, at.port), family=family_of(at.host), dualstack_ipv6=is_of_both):
                pass
        except OSError as error:
            hint = "; null starts none" if field == "gateway.port" else ""
            raise StartError(f"cannot listen on {at}: {error.strerror or error}{hint}", field=field) from None


def reachable(address: str) -> str:
    """Where commands on this host find a router that may listen on all of its addresses."""
    parts = urlsplit(f"//{address}")
    host = _ALL.get(parts.hostname or "")
    return address if host is None or parts.port is None else address_of(host, parts.port)
