"""All services of the tests with TLS, keys and a cluster secret: `make secured`. The tests themselves are the same.

Settings hold for services of the tests' own, and stand in the environment for commands; clients read theirs there.
"""

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest

from benchmarks.certificates import Authority
from cluster_configs.loading import ENVIRONMENT_PREFIX
from cluster_wire.secret import write_secret
from control_plane.access.api_keys import new_key
from control_plane.access.key_file import edit
from control_plane.access.roles import Role

_IS_ON = bool(os.environ.get("TESTS_SECURED"))
SCHEME = "https" if _IS_ON else "http"
# Of tests of tools and examples that are asked without a key, and of a worker that has no part in the secret.
for_open_services = pytest.mark.skipif(_IS_ON, reason="of a service that asks nobody for a key")


def use() -> None:
    """Once for each process, before any service or client is made."""
    for key, value in settings().items():
        os.environ[f"{ENVIRONMENT_PREFIX}{key.replace('.', '__').upper()}"] = value
    os.environ.update(_of_clients())


def settings() -> Mapping[str, str]:
    """Of a service, by key."""
    if not _IS_ON:
        return {}
    folder = _folder()
    return {
        "security.keys_file": str(folder / "keys.json"),
        "security.secret_file": str(folder / "secret"),
        "security.certificate_file": str(folder / "service.crt"),
        "security.certificate_key_file": str(folder / "service.key"),
        "security.ca_file": str(folder / "authority.pem"),
    }


def headers() -> dict[str, str]:
    """Of an HTTP request."""
    return {"authorization": f"Bearer {key()}"} if _IS_ON else {}


def key() -> str:
    """Of an SDK, which wants one in any case."""
    return _key() if _IS_ON else "none"


def channel(address: str) -> grpc.aio.Channel:
    """A router's, for calls that no client makes."""
    if not _IS_ON:
        return grpc.aio.insecure_channel(address)
    trusting = grpc.ssl_channel_credentials((_folder() / "authority.pem").read_bytes())
    return grpc.aio.secure_channel(
        address, grpc.composite_channel_credentials(trusting, grpc.access_token_call_credentials(_key()))
    )


def _of_clients() -> Mapping[str, str]:
    if not _IS_ON:
        return {}
    authority = str(_folder() / "authority.pem")
    # The last one is that of HTTP clients.
    return {"RACHIS_API_KEY": _key(), "RACHIS_CA_FILE": authority, "SSL_CERT_FILE": authority}


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="rachis-secured-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_secret(folder / "secret")
    Authority(folder).sign("service", "127.0.0.1", "localhost", days=90.0)
    return folder


@functools.cache
def _key() -> str:
    roles = (Role.GENERATE, Role.OPERATE)
    stored, given = new_key("tests", "tests", roles, lowest_priority=0, now_s=0.0, expires_s=None)
    edit(_folder() / "keys.json", lambda keys: keys.update({stored.key_id: stored}))
    return given
