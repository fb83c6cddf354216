"""Cost models by their names in `cluster_sim/cost_models/`, or from files that a user gives.

A cost model is a JSON file; `cost_models/README.md` has its format.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster_configs.json_files import read_object
from cluster_core.errors import InvalidInputError
from cluster_sim.costs import cost_files, measured, roofline
from cluster_sim.costs.step_work import CostModel

_KINDS: Mapping[str, Callable[[str, Path, Mapping[str, Any]], CostModel]] = {
    "roofline": roofline.of_content,
    "measured": measured.of_content,
}


def load(name_or_path: str) -> CostModel:
    """The model of that name in `cost_models/`, or the one in a file. Raises InvalidInputError naming file and key."""
    path = cost_files.path_of(name_or_path)
    content = read_object(path)
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InvalidInputError(f"must be of {', '.join(_KINDS)}, got {kind!r}", field=f"{path}: kind")
    return _KINDS[kind](path.stem, path, content)


def names() -> list[str]:
    """Of the models that come with this package."""
    return cost_files.names_of(cost_files.FOLDER)
