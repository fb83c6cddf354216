"""From layers to one configuration: flag over environment over file over profile over default.

A layer is a flat table from dotted keys to values, so every value in force can name the layer it came from.
Environment variables are `RACHIS_` and the key in capitals with `__` for the dots: `RACHIS_ROUTER__PORT=7000`.
An unknown key anywhere is refused, with the nearest valid one.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from rachis import client, tls

from cluster_configs.front_keys import masked_keys
from cluster_configs.schema import RachisConfig
from cluster_configs.yaml_complaint import yaml_complaint
from cluster_core.errors import ConfigError

ENVIRONMENT_PREFIX = "RACHIS_"
DEFAULT_PROFILE = "cpu-local"
PROFILES = resources.files("cluster_configs") / "profiles"
# Read by other parts than the configuration.
OTHER_VARIABLES = frozenset(
    {"RACHIS_PROFILE", "RACHIS_CONFIG", "RACHIS_STATE_DIR", "RACHIS_SERVICE", client.KEY_VARIABLE, *tls.VARIABLES}
)

_SECRET = frozenset({"redis.url", "gateway.options"})
_PASSWORD = re.compile(r"(://[^/?#]*?:).*@")
_PASSWORD_PARAMETER = re.compile(r"([?&]password=)[^&#]*")


@dataclass(frozen=True, slots=True)
class Entry:
    """One value in force and the layer it came from."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: RachisConfig
    entries: tuple[Entry, ...]


def load(
    *,
    profile: str | None = None,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    profiles: Traversable = PROFILES,
) -> LoadedConfig:
    """The configuration in force. profiles: their folder.

    Raises ConfigError naming the layer, the key and what is wrong with it.
    """
    environment = environment or {}
    profile = profile or environment.get("RACHIS_PROFILE") or DEFAULT_PROFILE
    file = file or (Path(environment["RACHIS_CONFIG"]) if environment.get("RACHIS_CONFIG") else None)
    layers: list[tuple[str, dict[str, Any]]] = [("profile", _read_profile(profile, profiles))]
    if file is not None:
        layers.append(("file", _read_file(file)))
    layers.append(("environment", _read_environment(environment)))
    layers.append(("flag", dict(flags or {})))
    return _merge(layers)


def profile_names(profiles: Traversable = PROFILES) -> list[str]:
    return sorted(Path(item.name).stem for item in profiles.iterdir() if item.name.endswith(".yaml"))


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """`--set key=value` flags; values are read as YAML."""
    parsed: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"`{masked(assignment)}` is not of the form key=value", field="--set")
        parsed[key.strip()] = _parse_value(value, f"--set {key.strip()}")
    return parsed


def masked(value: Any) -> Any:
    """A value fit to be printed: a URL loses its password, wherever it stands, and options of a gateway their keys."""
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return [masked(each) for each in masked_keys(value)]
    if isinstance(value, str) and "://" in value:
        return _PASSWORD_PARAMETER.sub(r"\1***", _PASSWORD.sub(r"\1***@", value))
    return value


def _merge(layers: list[tuple[str, dict[str, Any]]]) -> LoadedConfig:
    valid = dict(_flatten(RachisConfig().model_dump()))
    sources = dict.fromkeys(valid, "default")
    tree: dict[str, Any] = {}
    for source, values in layers:
        for key, value in values.items():
            if value is None and any(name.startswith(f"{key}.") for name in valid):
                # A section without entries, as a file may have.
                continue
            if key not in valid:
                raise _unknown_key(source, key, valid)
            _put(tree, key, value)
            sources[key] = source
    try:
        config = RachisConfig.model_validate(tree)
    except ValidationError as error:
        raise _bad_value(error, sources) from None
    entries = tuple(Entry(key, value, sources[key]) for key, value in _flatten(config.model_dump(mode="json")))
    return LoadedConfig(config, entries)


def _unknown_key(source: str, key: str, valid: Mapping[str, Any]) -> ConfigError:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    if not near:
        by_last = {name.rpartition(".")[2]: name for name in valid}
        near = [by_last[match] for match in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1, cutoff=0.6)]
    hint = f"; did you mean `{near[0]}`?" if near else "; `rachis config show` lists the valid keys"
    return ConfigError(f"unknown key (from the {source}){hint}", field=key)


def _bad_value(error: ValidationError, sources: Mapping[str, str]) -> ConfigError:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    source = f" (from the {sources[key]})" if key in sources else ""
    # However a URL is misspelt, its password is nobody's business.
    given = "" if key in _SECRET else f", got {masked(first['input'])!r}"
    return ConfigError(f"{message}{given}{source}" if key in sources else message, field=key)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping | BaseModel):
            yield from _flatten(dict(value), f"{key}.")
        else:
            yield key, value


def tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration file with these keys holds: `a.b` is the entry `b` of section `a`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        _put(tree, key, value)
    return tree


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value


def _read_profile(name: str, profiles: Traversable) -> dict[str, Any]:
    known = profile_names(profiles)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"unknown profile `{name}`; {hint}", field="profile")
    return _parse_yaml((profiles / f"{name}.yaml").read_text(), f"profile {name}")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", field=str(path)) from None
    return _parse_yaml(text, str(path))


def _parse_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(yaml_complaint(error), field=name) from None
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError("must be a table of sections", field=name)
    return dict(_flatten(tree))


def _parse_value(text: str, field: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(yaml_complaint(error), field=field) from None


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."): _parse_value(value, name)
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name not in OTHER_VARIABLES
    }
