"""The file that keeps what a stop policy learned over restarts.

It is one JSON object, `{"format": 1, "policy": name, "made_for": {...}, "table": dumped}`. made_for says what the
values depend on: model, hardware, shape of the engine. It also gives the file its name, so another model has another
table and an earlier one is found again. Files are replaced as a whole. One that cannot be used is moved aside, once: a
second one takes the place of the first.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol

from cluster_core.errors import UnavailableError
from decode_worker.learned_values import entries

_FORMAT = 1
_MOST_BYTES = 2**20


class Loadable(Protocol):
    def load(self, dumped: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of looking for a file."""

    loaded: bool
    # Why a file that is there was not used; empty when it was, or when there is none.
    problem: str = ""


class PolicyFile:
    def __init__(self, folder: Path, policy: str, made_for: Mapping[str, str]) -> None:
        self._policy = policy
        self._made_for = dict(made_for)
        canonical = json.dumps(self._made_for, sort_keys=True, separators=(",", ":"))
        self.path = folder / f"{policy}-{sha256(canonical.encode()).hexdigest()[:12]}.json"
        self.stale_path = self.path.with_name(f"{self.path.name}.stale")

    def save(self, table: Any) -> None:
        """Makes the folder where it is missing. Raises UnavailableError when it cannot be written."""
        content = {"format": _FORMAT, "policy": self._policy, "made_for": self._made_for, "table": table}
        text = json.dumps(content, indent=1, allow_nan=False)
        temporary = self.path.with_name(f"{self.path.name}.{token_hex(8)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(text)
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise UnavailableError(f"what policy {self._policy} learned could not be saved: {error}") from None

    def restore(self, policy: Loadable) -> Restored:
        """Gives the policy what was saved. Raises nothing: what cannot be used is moved aside, the policy unchanged."""
        try:
            policy.load(self._read())
        except FileNotFoundError:
            return Restored(loaded=False)
        except (OSError, ValueError) as error:
            return Restored(loaded=False, problem=f"{self.path} is not used: {error}; {self._set_aside()}")
        return Restored(loaded=True)

    def _read(self) -> Any:
        with self.path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON ({error})") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            found = content.get("format") if isinstance(content, dict) else None
            raise ValueError(f"its format is {found!r:.80}, this version reads {_FORMAT}")
        given = entries(content, "format", "policy", "made_for", "table")
        if given["policy"] != self._policy:
            raise ValueError(f"it is of policy {given['policy']!r:.80}, not {self._policy}")
        if given["made_for"] != self._made_for:
            raise ValueError(f"it was made for {given['made_for']!r:.300}, not for {self._made_for}")
        return given["table"]

    def _set_aside(self) -> str:
        try:
            self.path.replace(self.stale_path)
        except OSError as error:
            return f"it could not be moved aside: {error}"
        return f"it was moved to {self.stale_path.name}"
