"""A measuring process that does as it is told, for the tests of what its parent makes of it."""

import os
import sys
from typing import Any

from benchmarks.measuring_process import Reports, run_measurement
from cluster_core.errors import InvalidInputError, UnavailableError


async def obey(arguments: dict[str, Any], reports: Reports) -> dict[str, Any]:
    reports.phase("working")
    reports.total(2)
    match arguments["do"]:
        case "refuse":
            raise InvalidInputError("bad input")
        case "fail":
            raise UnavailableError("it went away")
        case "crash":
            sys.stdout.write("noise between the reports\n")
            raise ZeroDivisionError
        case "vanish":
            os._exit(3)
    reports.done()
    reports.done()
    return {"value": arguments["value"]}


if __name__ == "__main__":
    run_measurement(obey)
