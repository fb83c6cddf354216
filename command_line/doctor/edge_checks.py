"""Checks of where the service meets its host and its callers: who may call, certificates, HTTP, disks. Pure."""

from cluster_configs.exposure import exposed
from cluster_configs.listening import administration_of, is_loopback
from command_line.doctor.findings import Fault, Verdicts
from command_line.doctor.seen import Seen

LEAST_CERTIFICATE_DAYS = 14
LEAST_DISK_SHARE = 0.05
LEAST_DISK_BYTES = 5 << 30
_DAY_S = 86_400
_GIB = 1 << 30


def exposure(seen: Seen) -> Verdicts:
    """What would be refused if `security.open` did not ask for it."""
    security = seen.config.security.model_copy(update={"open": False})
    for field, _ in exposed(seen.config.model_copy(update={"security": security})):
        section, _, name = field.partition(".")
        host = getattr(getattr(seen.config, section), name)
        yield Fault(field, f"{field} is {host} and there are no API keys: whoever reaches it may do everything")


def encryption(seen: Seen) -> Verdicts:
    config = seen.config
    if not config.security.knows_callers or config.security.certificate_file is not None:
        return
    administration = administration_of(config.router)
    places = [("router.host", config.router.host)]
    if administration is not None:
        places.append(("router.admin_host", administration.host))
    if config.gateway.port is not None:
        places.append(("gateway.host", config.gateway.host))
    for field, host in places:
        if not is_loopback(host):
            yield Fault(field, f"{field} is {host} and there is no certificate: API keys travel as they are")


def certificate(seen: Seen) -> Verdicts:
    if seen.certificate_ends_s is None:
        return
    days = (seen.certificate_ends_s - seen.now_unix_s) / _DAY_S
    if days < 0:
        yield Fault("security.certificate_file", f"the router's certificate has ended {-days:.0f} days ago")
    elif days < LEAST_CERTIFICATE_DAYS:
        yield Fault("security.certificate_file", f"the router's certificate ends in {days:.0f} days")


def gateway(seen: Seen) -> Verdicts:
    if seen.gateway_error:
        yield Fault("gateway", f"the HTTP APIs are configured (gateway.port) and do not answer: {seen.gateway_error}")


def disks(seen: Seen) -> Verdicts:
    for disk in seen.disks:
        if disk.free_bytes < min(LEAST_DISK_BYTES, LEAST_DISK_SHARE * disk.total_bytes):
            left = f"{disk.free_bytes / _GIB:.1f} GiB are left"
            yield Fault(disk.path, f"the disk of {disk.path} is almost full, {left}: {disk.what} go there")
