"""Reads cost model files: numbers that say their unit and where they are from, in tables that may be like others.

A number is `{"value": ..., "unit": ..., "source": ...}`. A table is an object of numbers; the name of a file in a
folder of `cost_models/`; or an object with such a name under "like", whose own numbers replace those of that file.
Errors are InvalidInputError and name file and key.
"""

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_configs.json_files import read_object
from cluster_core.errors import InvalidInputError

FOLDER = Path(__file__).parent.parent / "cost_models"


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a number has to be. least: the value itself is allowed where `least_allowed`."""

    unit: str
    least: float = 0.0
    most: float = math.inf
    whole: bool = False
    least_allowed: bool = False

    def fits(self, value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return False
        if self.whole and value != int(value):
            return False
        return value <= self.most and (value > self.least or (self.least_allowed and value == self.least))

    @property
    def words(self) -> str:
        low = f"{'from' if self.least_allowed else 'above'} {self.least:g}"
        return f"a {'whole ' if self.whole else ''}number {low}{'' if math.isinf(self.most) else f' to {self.most:g}'}"


COUNT = Quantity("count", whole=True)
SHARE = Quantity("share", most=1.0)


def path_of(name_or_path: str) -> Path:
    """The file of a model that comes with this package, or the one at that path."""
    built_in = FOLDER / f"{name_or_path}.json"
    if "/" not in name_or_path and built_in.is_file():
        return built_in
    path = Path(name_or_path)
    if not path.is_file():
        names = names_of(FOLDER)
        near = difflib.get_close_matches(name_or_path, names, n=1)
        hint = f"the nearest is {near[0]!r}" if near else f"there are {', '.join(names)}"
        raise InvalidInputError(f"is neither a file nor the name of a cost model; {hint}", field=name_or_path)
    return path


def names_of(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.json"))


def check_keys(content: Mapping[str, Any], allowed: Collection[str], place: str) -> None:
    for key in content:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"there are {', '.join(allowed)}"
            raise InvalidInputError(f"is not known; {hint}", field=f"{place}{key}")


def number(content: Mapping[str, Any], key: str, quantity: Quantity, place: str) -> float:
    """place: of the table, up to its last dot."""
    where = f"{place}{key}"
    if key not in content:
        raise InvalidInputError("is missing", field=where)
    given = content[key]
    if not isinstance(given, dict):
        raise InvalidInputError('must be {"value": ..., "unit": ..., "source": ...}', field=where)
    check_keys(given, ("value", "unit", "source"), f"{where}.")
    if given.get("unit") != quantity.unit:
        raise InvalidInputError(f"must be {quantity.unit!r}, got {given.get('unit')!r}", field=f"{where}.unit")
    source = given.get("source")
    if not isinstance(source, str) or not source.strip():
        raise InvalidInputError("must say where the value is from", field=f"{where}.source")
    if not quantity.fits(given.get("value")):
        raise InvalidInputError(f"must be {quantity.words}, got {given.get('value')!r}", field=f"{where}.value")
    return float(given["value"])


def table(
    content: Mapping[str, Any], key: str, quantities: Mapping[str, Quantity], folder: str, path: Path
) -> dict[str, float]:
    """The numbers under `key`, all of `quantities`."""
    given = content.get(key)
    if isinstance(given, str):
        given = {"like": given}
    if not isinstance(given, dict):
        raise InvalidInputError(f"must be an object, or a name of {folder}/", field=f"{path}: {key}")
    place = f"{path}: {key}."
    numbers = dict(given)
    like = numbers.pop("like", None)
    check_keys(numbers, quantities, place)
    if like is None:
        return {name: number(numbers, name, each, place) for name, each in quantities.items()}
    names = names_of(FOLDER / folder)
    if like not in names:
        raise InvalidInputError(f"must be of {', '.join(names)}, got {like!r}", field=f"{place}like")
    shared = FOLDER / folder / f"{like}.json"
    return {
        name: number(numbers, name, each, place)
        if name in numbers
        else number(read_object(shared), name, each, f"{shared}: ")
        for name, each in quantities.items()
    }
