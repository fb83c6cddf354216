"""What each tenant may have of the service, from a file of the operator's; `access` follows it.

    acme:                    a tenant, as its keys or tokens name it
      requests_per_s: 20     over all routers; left out: no limit
      tokens_per_s: 40000    of prompts and answers together, likewise
      burst_s: 10            how many seconds' worth may come at once
      weight: 2              its part of what is waited for
    "*":                     each tenant that is not named; left out: no limits, and a weight of 1
      requests_per_s: 5

Pure, but for the reading of the file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster_core.errors import ConfigError
from control_plane.access.api_keys import NAME, NAME_RULE

TENANTS_FIELD = "security.tenants_file"
# Whoever is not named.
OTHERS = "*"
# What each limit may be.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "requests_per_s": (0.001, 1_000_000.0),
    "tokens_per_s": (0.01, 1_000_000_000.0),
    "burst_s": (1.0, 3600.0),
    "weight": (0.01, 100.0),
}


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Of one tenant. None: no limit. Tokens are of prompts and answers."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    burst_s: float = 10.0
    weight: float = 1.0

    @property
    def has_rates(self) -> bool:
        return self.requests_per_s is not None or self.tokens_per_s is not None


UNLIMITED = TenantLimits()
# By tenant, and OTHERS.
LimitsByTenant = Mapping[str, TenantLimits]
LimitsOf = Callable[[str], TenantLimits]


def limits_of(tenants: LimitsByTenant, tenant: str) -> TenantLimits:
    return tenants.get(tenant) or tenants.get(OTHERS) or UNLIMITED


def read_tenants(path: Path) -> dict[str, TenantLimits]:
    """Raises ConfigError, OSError."""
    try:
        return parsed_tenants(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text", field=TENANTS_FIELD) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", field=TENANTS_FIELD) from None


class _OnceLoader(yaml.SafeLoader):
    """What is there twice is refused; YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(f"is there twice, in lines {lines[key.value]} and {line}", field=key.value)
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def parsed_tenants(text: str) -> dict[str, TenantLimits]:
    """Raises ConfigError, which names tenant, limit and bounds."""
    try:
        # It makes nothing that a safe loader does not.
        whole = yaml.load(text, _OnceLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"is not valid YAML: {error}") from None
    if whole is None:
        return {}
    if not isinstance(whole, dict):
        raise ConfigError("must be a table of tenants, each with its limits")
    try:
        return {_tenant(name): _limits(name, given) for name, given in whole.items()}
    except ValueError:
        # Python writes none in thousands of digits.
        raise ConfigError("has a number that is too long to be said") from None


def _tenant(name: Any) -> str:
    if not isinstance(name, str) or not (name == OTHERS or NAME.fullmatch(name)):
        raise ConfigError(
            f'{NAME_RULE}, or "{OTHERS}" for all others, in quotes where YAML sees no text', field=f"{name}"
        )
    return name


def _limits(tenant: str, given: Any) -> TenantLimits:
    if not isinstance(given, dict):
        raise ConfigError(f"must be a table of {', '.join(_BOUNDS)}, got {given!r}", field=tenant)
    unknown = next((name for name in given if name not in _BOUNDS), None)
    if unknown is not None:
        raise ConfigError(f"is none of {', '.join(_BOUNDS)}", field=f"{tenant}.{unknown}")
    return TenantLimits(**{name: _number(f"{tenant}.{name}", name, value) for name, value in given.items()})


def _number(field: str, name: str, value: Any) -> float:
    low, high = _BOUNDS[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # What is no number is in no bounds.
    if not is_number or not low <= value <= high:
        is_nothing = is_number and value == 0 and name.endswith("_per_s")
        hint = "; a tenant that may send nothing has no key with the role `generate`" if is_nothing else ""
        raise ConfigError(f"must be a number from {low:g} to {high:,.0f}, got {value!r}{hint}", field=field)
    return float(value)
