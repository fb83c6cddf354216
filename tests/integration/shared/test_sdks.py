"""LangChain, LlamaIndex and OpenAI's Agents SDK, the real ones, against a running service."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line.own_service import Target
from tests import ROOT
from tests.integration import secured

pytestmark = pytest.mark.integration

SDKS = Path(sys.prefix) / "sdks" / "bin" / "python"


@secured.for_open_services
async def test_what_people_build_on_works(target: Target, gateway: str) -> None:
    assert SDKS.exists(), "run `make sdks`"
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    ran = await asyncio.to_thread(
        subprocess.run,
        [str(SDKS), "-m", "tests.sdks", "--address", target.address, "--http", gateway],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "protos")))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    checks = sum(each.read_text().count("def check_") for each in (ROOT / "tests" / "sdks").glob("*_checks.py"))
    assert ran.stdout.count("ok ") == checks > 0
