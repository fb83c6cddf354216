"""What lies around a router: its page for Prometheus, the HTTP APIs, its certificate, the disks of its host."""

import asyncio
import os
import shutil
import ssl
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rachis.client import KEY_VARIABLE

from cluster_configs.listening import is_loopback
from cluster_core.ports import address_of
from command_line.doctor.seen import Disk, Part, Seen
from command_line.options import state_file
from command_line.own_pages import TIMEOUT_S, UNREAD, page_of

# A gateway is up half a minute after its router; on a busy host it may take minutes.
GATEWAY_START_S = 300.0
_ANY = {"", "0.0.0.0", "::", "[::]"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the router is called. is_here: on this host."""

    host: str
    port: str
    is_here: bool


def place_of(address: str, own_address: str = "") -> Place:
    """address: also a name for gRPC, such as dns:///name:port. own_address: of the service that runs on this host."""
    before, _, port = address.rpartition(":")
    host = before.rpartition("/")[2].strip("[]")
    return Place(host, port, host in _ANY or is_loopback(host) or address == own_address)


async def added(address: str, seen: Seen) -> Seen:
    """address: by which the router is called."""
    running = state_file().read()
    place = place_of(address, running.admin_address if running is not None else "")
    seen = await _with_metrics(place, seen)
    seen = await with_gateway(place, seen)
    seen = await _with_certificate(place, seen)
    return with_disks(place, seen)


async def _with_metrics(place: Place, seen: Seen) -> Seen:
    # A router of a version before has no URL, and encrypts nothing there.
    scheme = seen.router.metrics_url.partition("://")[0] or "http"
    url, key = f"{scheme}://{reached(seen.router.metrics_address, place.host)}/metrics", ""
    if seen.config.security.metrics_need_key:
        if not place.is_here:
            return seen.without(Part.METRICS, f"{url} asks for a key, which would travel from here as it is")
        key = os.environ.get(KEY_VARIABLE, "")
    try:
        page = await asyncio.to_thread(page_of, url, TIMEOUT_S, key)
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except UNREAD as error:
        return seen.without(Part.METRICS, f"{url} cannot be read from here: {error}")
    figures = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    return replace(seen, metrics=figures)


async def with_gateway(place: Place, seen: Seen) -> Seen:
    """The one that `rachis serve` starts; a router alone has none beside it."""
    section, security = seen.config.gateway, seen.config.security
    if section.port is None or Part.CONFIGURATION in seen.missing:
        why = seen.missing.get(Part.CONFIGURATION)
        return seen.without(Part.GATEWAY, why) if why else seen
    if not section.port:
        return seen.without(Part.GATEWAY, "gateway.port is 0, and which port was taken is not told")
    if security.client_ca_file is not None:
        return seen.without(Part.GATEWAY, "it asks for a certificate (security.client_ca_file)")
    if is_loopback(section.host) and not place.is_here:
        return seen.without(Part.GATEWAY, f"it listens on {section.host} of another host")
    scheme = "http" if security.certificate_file is None else "https"
    url = f"{scheme}://{reached(address_of(section.host, section.port), place.host)}/health"
    try:
        await asyncio.to_thread(page_of, url)
    except UNREAD as error:
        if seen.router.uptime_s < GATEWAY_START_S:
            return seen.without(Part.GATEWAY, f"{url} does not answer yet; the router is up for less than five minutes")
        if Part.POOLS in seen.missing:
            return seen.without(Part.GATEWAY, f"{url} does not answer, and `rachis serve` may run on another host")
        return replace(seen, gateway_error=f"{url}: {error}")
    return seen


async def _with_certificate(place: Place, seen: Seen) -> Seen:
    """Its end, as the router's handshake shows it: whether it is trusted is between clients and their authorities."""
    if Part.CONFIGURATION in seen.missing:
        return seen.without(Part.CERTIFICATE, seen.missing[Part.CONFIGURATION])
    if seen.config.security.certificate_file is None:
        return seen
    try:
        ends_s = await asyncio.wait_for(_certificate_end_s(place.host, int(place.port)), TIMEOUT_S)
    except (OSError, ValueError) as error:
        return seen.without(Part.CERTIFICATE, f"{place.host}:{place.port} shows none: {error or 'it took too long'}")
    return replace(seen, certificate_ends_s=ends_s)


async def _certificate_end_s(host: str, port: int) -> float:
    from cryptography.x509 import load_der_x509_certificate

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # gRPC takes no handshake without it.
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    return load_der_x509_certificate(shown).not_valid_after_utc.timestamp()


def with_disks(place: Place, seen: Seen) -> Seen:
    """Those that this host's services write to."""
    if not place.is_here:
        return seen.without(Part.DISKS, "the router runs on another host")
    places = (("logs of Ray and of engines", Path(tempfile.gettempdir())), ("what services keep", state_file().folder))
    disks = []
    for what, path in places:
        there = next(each for each in (path, *path.parents) if each.exists())
        usage = shutil.disk_usage(there)
        disks.append(Disk(what, str(path), usage.free, usage.total))
    return replace(seen, disks=disks)


def reached(listens: str, host: str) -> str:
    """host:port by which what listens there is reached, where it listens on all addresses of the router's host."""
    own, _, port = listens.rpartition(":")
    return address_of(host if own in _ANY else own.strip("[]"), int(port or 0))
