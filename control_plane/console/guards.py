"""Whether a page of somebody else's makes this request, or somebody reads along: by its headers alone. Pure.

A browser sends what any page asks it to. What keeps such a page out, each by itself:

    Host             without keys: an address or `localhost`, never a name that somebody else's DNS may point here
    Origin, Sec-Fetch-Site   see `control_plane.access.foreign_pages`
    Content-Type     JSON, which a form cannot send and another origin may not without asking first
    Authorization    with keys: a header, which no page sends but the one in which the key was typed

A certificate a browser shows whichever page asks: there it is the lines above that keep such a page out, and TLS, by
which no name that somebody else's DNS points here is this router's.
"""

import ipaddress
from collections.abc import Mapping

from cluster_configs.listening import is_loopback
from control_plane.access.foreign_pages import refusal_of_page

JSON = "application/json"


def refusal(headers: Mapping[str, str], *, is_open: bool) -> str:
    """Why a call is not looked at, in a sentence; empty where it is. headers: names in lower case. is_open: nobody is
    asked for a key."""
    host = headers.get("host", "")
    if is_open and not _is_address(host):
        return (
            f"without API keys the console is reached by an address or `localhost` alone, not as `{host[:80]}`: "
            "see docs/console.md"
        )
    sentence = refusal_of_page(headers)
    if sentence:
        return sentence
    if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        return f"a call has to have the header `content-type: {JSON}`"
    return ""


def refusal_of_host(peer: str, own: str, *, is_open: bool, is_encrypted: bool, is_local: bool) -> str:
    """Why the host that calls is not answered, in a sentence; empty where it is. peer, own: addresses of both ends of
    the connection. is_encrypted: the connection is. is_local: administration is on loopback."""
    if is_loopback(peer) or peer == own:
        return ""
    if not (is_open or is_encrypted):
        return (
            "keys are taken here from the router's own host alone, since this port is not encrypted "
            "(security.metrics_tls): see docs/console.md for a way through SSH"
        )
    if is_local:
        return (
            "administration is answered on the router's own host alone (router.admin_host): "
            "see docs/console.md for a way through SSH"
        )
    return ""


def _is_address(host: str) -> bool:
    """host: as of the header, with a port or without."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
