"""A service without keys is for its own machine: what listens beyond loopback has to be asked for."""

from collections.abc import Iterator

from cluster_configs.listening import administration_of, is_loopback
from cluster_configs.schema import RachisConfig, SecuritySection
from cluster_core.errors import ConfigError

_SENTENCE = (
    "is {}, and without API keys whoever reaches it may do everything: give security.keys_file and "
    "security.secret_file, see docs/access.md, or set security.open"
)


def check_exposure(config: RachisConfig) -> None:
    """Of a service, before anything listens. Raises ConfigError."""
    for field, sentence in exposed(config):
        raise ConfigError(sentence, field=field)


def exposed(config: RachisConfig) -> Iterator[tuple[str, str]]:
    """What of a service listens for everybody: the setting, and what is wrong with it."""
    if not config.security.knows_callers and not config.security.open:
        if not is_loopback(config.router.host):
            yield "router.host", _SENTENCE.format(config.router.host)
        administration = administration_of(config.router)
        if administration is not None and not is_loopback(administration.host):
            yield "router.admin_host", _SENTENCE.format(administration.host)
        if config.router.metrics_host is not None and not is_loopback(config.router.metrics_host):
            yield "router.metrics_host", _SENTENCE.format(config.router.metrics_host)
        if config.gateway.port is not None and not is_loopback(config.gateway.host):
            yield "gateway.host", _SENTENCE.format(config.gateway.host)


def check_gateway_exposure(security: SecuritySection, host: str) -> None:
    """Of a gateway alone: with the service's secret it asks callers for their keys. Raises ConfigError."""
    if security.secret_file is None and not security.open and not is_loopback(host):
        raise ConfigError(_SENTENCE.format(host), field="gateway.host")
