"""Runs each `check_*` of this folder against a service with the built-in model, and says which did not hold."""

import argparse
import asyncio
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="host:port of a router")
    parser.add_argument("--http", required=True, help="URL of a gateway of the same service")
    given = parser.parse_args()
    failed = 0
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name == "__main__":
            continue
        for name, check in vars(importlib.import_module(f"tests.sdks.{module.name}")).items():
            if name.startswith("check_"):
                failed += not _holds(f"{module.name}.{name}", check, given.address, given.http)
    return min(failed, 1)


def _holds(name: str, check: Callable[[str, str], object], address: str, http: str) -> bool:
    try:
        running = check(address, http)
        if inspect.iscoroutine(running):
            asyncio.run(running)
    except Exception:  # noqa: BLE001 - whatever it is, the others are run, too
        traceback.print_exc()
        sys.stdout.write(f"failed {name}\n")
        return False
    sys.stdout.write(f"ok {name}\n")
    return True


if __name__ == "__main__":
    sys.exit(main())
