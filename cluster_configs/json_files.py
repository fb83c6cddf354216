"""JSON files that people give: one object each."""

import json
from pathlib import Path
from typing import Any

from cluster_core.errors import InvalidInputError


def read_object(path: Path) -> dict[str, Any]:
    """Raises InvalidInputError naming the file."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise InvalidInputError(f"cannot be read: {error.strerror or error}", field=str(path)) from None
    except (ValueError, RecursionError):
        raise InvalidInputError("is not JSON", field=str(path)) from None
    if not isinstance(content, dict):
        raise InvalidInputError("must be an object", field=str(path))
    return content
