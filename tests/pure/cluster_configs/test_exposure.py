"""What listens for everybody has to be asked for, or to know who calls."""

from typing import Any

import pytest

from cluster_configs.exposure import check_exposure, check_gateway_exposure, exposed
from cluster_configs.loading import load
from cluster_configs.schema import RachisConfig
from cluster_core.errors import ConfigError

KEYS = {"security.keys_file": "/k", "security.secret_file": "/s"}


def config(**flags: Any) -> RachisConfig:
    return load(flags={key.replace("__", "."): value for key, value in flags.items()}).config


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    check_exposure(config(router__host=host, gateway__host=host))
    check_gateway_exposure(config().security, host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "router.example"])
def test_beyond_it_keys_are_needed_or_a_word(host: str) -> None:
    for field in ("router.host", "router.admin_host", "router.metrics_host", "gateway.host"):
        with pytest.raises(ConfigError, match=r"without API keys whoever reaches it .* security\.open") as raised:
            check_exposure(config(**{field: host}))
        assert raised.value.field == field
        check_exposure(config(**{field: host, "security.open": True}))
        check_exposure(config(**{field: host}, **KEYS))
    with pytest.raises(ConfigError):
        check_gateway_exposure(config().security, host)
    check_gateway_exposure(config(security__secret_file="/s").security, host)
    check_gateway_exposure(config(security__open=True).security, host)


def test_a_gateway_that_is_not_started_listens_nowhere() -> None:
    assert not list(exposed(config(gateway__host="0.0.0.0", gateway__port=None)))


def test_keys_need_the_secret() -> None:
    with pytest.raises(ConfigError, match="keys_file needs secret_file"):
        config(security__keys_file="/k")


def test_metrics_ask_for_keys_where_there_are_some() -> None:
    with pytest.raises(ConfigError, match="metrics_need_key needs keys_file or jwt_jwks_file"):
        config(security__metrics_need_key=True)
    assert config(security__metrics_need_key=True, **KEYS).security.metrics_need_key


def test_tokens_need_the_secret_and_whom_they_are_of_and_for() -> None:
    tokens = {"security.jwt_jwks_file": "/j", "security.secret_file": "/s"}
    with pytest.raises(ConfigError, match="jwt_jwks_file needs secret_file"):
        config(security__jwt_jwks_file="/j")
    for more in ({}, {"security.jwt_issuer": "i"}, {"security.jwt_audience": "a"}):
        with pytest.raises(ConfigError, match="needs jwt_issuer and jwt_audience"):
            config(**tokens, **more)
    whole = config(**tokens, **{"security.jwt_issuer": "i", "security.jwt_audience": "a", "router.host": "0.0.0.0"})
    check_exposure(whole)
