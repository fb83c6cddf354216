"""Files that a command will write, checked before minutes of measuring and not after."""

import os
from pathlib import Path

from cluster_core.errors import ConfigError

PICTURE_FORMATS = (".png", ".svg", ".pdf")


def check_writable(file: Path, option: str) -> None:
    """Raises ConfigError that names the option."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", field=option)
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"cannot write {file}", field=option)


def check_picture(file: Path, option: str) -> None:
    """Raises ConfigError that names the option."""
    if file.suffix.lower() not in PICTURE_FORMATS:
        raise ConfigError(f"must end with one of {', '.join(PICTURE_FORMATS)}, got {file}", field=option)
    check_writable(file, option)
