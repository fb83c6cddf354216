"""`rachis keys`: the API keys of a service, in their file; every router that has it takes a change up by itself."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from cluster_core.clock import unix_ms
from cluster_core.errors import ConfigError, NotFoundError
from command_line import options
from command_line.output import err, out, print_json, print_table

if TYPE_CHECKING:
    from control_plane.access.api_keys import ApiKey

T = TypeVar("T")

_DAY_S = 86_400.0
_MOST_DAYS = 36_500.0
_MOST_GRACE_S = 30 * _DAY_S

File = Annotated[
    Path | None, typer.Option("--file", help="The file of keys; default is `security.keys_file` of the configuration.")
]
Name = Annotated[str, typer.Argument(help="What the key is called, in messages and in the audit log.")]


def register(app: typer.Typer) -> None:
    keys = typer.Typer(help="API keys: who may do what.", no_args_is_help=True)
    keys.command("create")(create_command)
    keys.command("list")(list_command)
    keys.command("rotate")(rotate_command)
    keys.command("revoke")(revoke_command)
    keys.command("secret")(secret_command)
    app.add_typer(keys, name="keys")


def create_command(
    name: Name,
    tenant: Annotated[str, typer.Option(help="Whose cached prefixes its requests share.")],
    role: Annotated[list[str], typer.Option(help="generate, observe or operate; may be given several times.")],
    lowest_priority: Annotated[int, typer.Option(help="Requests of a lower number are refused.")] = 0,
    expires_days: Annotated[
        float | None, typer.Option(min=0, max=_MOST_DAYS, help="Days until it ends; default: it does not.")
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(help="A name in client certificates in place of a key: uri:spiffe://…, dns:… or cn:…."),
    ] = None,
    file: File = None,
    as_json: options.AsJson = False,
) -> None:
    """A new key. It is shown once, and kept nowhere. With --certificate there is none: whoever shows it is known."""
    from control_plane.access.api_keys import new_certificate, new_key
    from control_plane.access.roles import Role

    unknown = [each for each in role if each not in set(Role)]
    if unknown:
        raise ConfigError(f"must be one of {', '.join(Role)}, got `{unknown[0]}`", field="--role")
    now_s = _now_s()
    expires_s = None if expires_days is None else now_s + expires_days * _DAY_S
    roles, given = [Role(each) for each in role], ""
    if certificate is None:
        key, given = new_key(name, tenant, roles, lowest_priority=lowest_priority, now_s=now_s, expires_s=expires_s)
    else:
        key = new_certificate(
            name, tenant, roles, certificate, lowest_priority=lowest_priority, now_s=now_s, expires_s=expires_s
        )

    def add(keys: dict[str, "ApiKey"]) -> None:
        if any(each.name == name for each in keys.values()):
            raise ConfigError(f"there is a key `{name}`; rotate it, or revoke it first", field="name")
        taken = next((each.name for each in keys.values() if certificate and each.certificate == certificate), None)
        if taken is not None:
            raise ConfigError(f"`{taken}` has that certificate", field="--certificate")
        keys[key.key_id] = key

    _edit(file, add)
    if certificate is None:
        _show(name, given, as_json=as_json)
    elif as_json:
        print_json({"name": name, "certificate": certificate})
    else:
        out.print(f"{name} is whoever shows a certificate with {certificate}", markup=False)


def list_command(file: File = None, as_json: options.AsJson = False) -> None:
    """Which there are; nothing of what their holders were given."""
    from control_plane.access.key_file import read_keys

    path, now_s = _path(file), _now_s()
    try:
        keys = sorted(read_keys(path).values(), key=lambda key: key.name)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="--file") from None
    if as_json:
        print_json({"keys": [_as_json(key, now_s) for key in keys]})
        return
    columns = ("name", "tenant", "roles", "lowest priority", "expires", "known by")
    rows = [
        (
            key.name, key.tenant, ", ".join(sorted(key.roles)), key.lowest_priority,
            "expired" if key.has_expired(now_s) else _date(key.expires_s), _known_by(key, now_s),
        )
        for key in keys
    ]  # fmt: skip
    print_table(f"{len(keys)} keys in {path}", columns, rows)


def rotate_command(
    name: Name,
    grace_s: Annotated[
        float, typer.Option(min=0, max=_MOST_GRACE_S, help="How long the secret before goes on being good.")
    ] = _DAY_S,
    file: File = None,
    as_json: options.AsJson = False,
) -> None:
    """A new secret for a key. It is shown once; the one before ends after a while."""
    from control_plane.access.api_keys import rotated

    def replace(keys: dict[str, "ApiKey"]) -> str:
        found = _named(keys, name)
        keys[found.key_id], given = rotated(found, now_s=_now_s(), grace_s=grace_s)
        return given

    _show(name, _edit(file, replace), as_json=as_json)


def revoke_command(name: Name, file: File = None, as_json: options.AsJson = False) -> None:
    """End a key. Calls that run go on to their end; new ones are refused within a second or two."""
    _edit(file, lambda keys: keys.pop(_named(keys, name).key_id))
    if as_json:
        print_json({"revoked": name})
    else:
        out.print(f"{name} is revoked", markup=False)


def secret_command(
    path: Annotated[Path, typer.Argument(help="Where it is written; for `security.secret_file`.")],
    as_json: options.AsJson = False,
) -> None:
    """A new secret of a service, which all its routers and gateways need."""
    from cluster_wire.secret import write_secret

    write_secret(path)
    if as_json:
        print_json({"secret_file": str(path)})
    else:
        out.print(f"{path} has a secret; set security.secret_file to it at every router and gateway", markup=False)


def _path(file: Path | None) -> Path:
    if file is not None:
        return file
    configured = options.load_config(None, None, None, None).config.security.keys_file
    if configured is None:
        raise ConfigError("give it, or set security.keys_file", field="--file")
    return Path(configured)


def _edit(file: Path | None, change: "Callable[[dict[str, ApiKey]], T]") -> T:
    from control_plane.access.key_file import edit

    return edit(_path(file), change)


def _named(keys: Mapping[str, "ApiKey"], name: str) -> "ApiKey":
    found = next((key for key in keys.values() if key.name == name), None)
    if found is None:
        known = ", ".join(sorted(key.name for key in keys.values())) or "none"
        raise NotFoundError(f"no key `{name}`; there are: {known}", field="name")
    return found


def _show(name: str, given: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "key": given})
        return
    out.print(given, markup=False)
    err.print(f"the key of {name}: it is shown this once", markup=False)


def _as_json(key: "ApiKey", now_s: float) -> dict[str, object]:
    return {
        "name": key.name,
        "tenant": key.tenant,
        "roles": sorted(key.roles),
        "lowest_priority": key.lowest_priority,
        "created": _date(key.created_s),
        "expires": None if key.expires_s is None else _date(key.expires_s),
        "expired": key.has_expired(now_s),
        "live_secrets": len(key.live_secrets(now_s)),
        "certificate": key.certificate or None,
    }


def _known_by(key: "ApiKey", now_s: float) -> str:
    secrets = len(key.live_secrets(now_s))
    return key.certificate or f"{secrets} secret{'' if secrets == 1 else 's'}"


def _date(unix_s: float | None) -> str:
    return "never" if unix_s is None else datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")


def _now_s() -> float:
    return unix_ms() / 1000
