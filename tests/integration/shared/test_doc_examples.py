"""The examples of the guides, as they are written, against a running service."""

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from command_line.own_service import Target
from tests import ROOT
from tests.integration import secured

pytestmark = pytest.mark.integration

GUIDES = (
    "README.md", "docs/index.md", "docs/using.md", "docs/streaming.md", "docs/client.md", "docs/http.md", "docs/rag.md",
    "docs/agent.md", "docs/tune.md",
)  # fmt: skip
# With the language, and the name of the file that a tutorial has its reader write.
_FENCE = re.compile(r'^```(\w*)(?: title="([\w.]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"^curl .*?[^\\]$", re.DOTALL | re.MULTILINE)
# Commands that ask a running service, as somebody types them.
_ASKED = re.compile(
    r"^(?:\$ )?(?:\.venv/bin/)?rachis ((?:generate|status|trace|index top|index status|placement explain)\b[^#\n]*)",
    re.MULTILINE,
)
# What an example leaves to its reader: a retriever, an index, a client that is open already.
_FROM_ELSEWHERE = ("retrievers=", "await client.", "retriever)")


def blocks(*languages: str) -> list[tuple[str, str]]:
    """With the guide in which each stands."""
    return [
        (guide, text)
        for guide in GUIDES
        for found, _, text in _FENCE.findall((ROOT / guide).read_text())
        if found in languages
    ]


def named(guide: str, language: str) -> dict[str, str]:
    """Files that a reader of the guide writes (`python`), and what those print (`text`)."""
    return {
        name: text for found, name, text in _FENCE.findall((ROOT / guide).read_text()) if name and found == language
    }


def without_figures(text: str) -> str:
    return re.sub(r"\d+", "N", text)


SCRIPTS = [
    pytest.param(guide, text, id=f"{guide}-{number}")
    for number, (guide, text) in enumerate(blocks("python"))
    if "import" in text
    and "print(" in text
    and not ("asyncio.run(" not in text and any(each in text for each in _FROM_ELSEWHERE))
]
CALLS = [
    pytest.param(call, id=f"{guide}-{number}")
    for number, (guide, text) in enumerate(blocks(""))
    for call in _CALL.findall(text)
]
COMMANDS = sorted({found.strip() for _, text in blocks("", "console") for found in _ASKED.findall(text)})


async def printed(*command: str, folder: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    return out.decode()


def here(text: str, target: Target, gateway: str) -> str:
    return (
        text.replace("127.0.0.1:7421", target.address)
        .replace("http://127.0.0.1:8000", gateway)
        .replace('api_key="none"', f'api_key="{secured.key()}"')
    )


@pytest.mark.parametrize(("guide", "script"), SCRIPTS)
async def test_a_script_runs_as_it_is_written(
    guide: str, script: str, target: Target, gateway: str, tmp_path: Path
) -> None:
    written = named(guide, "python")
    for name, text in {**written, "example.py": script}.items():
        (tmp_path / name).write_text(here(text, target, gateway))
    told = await printed(sys.executable, "example.py", folder=tmp_path)
    assert told.strip()
    said = [text for name, text in named(guide, "text").items() if written[name] == script]
    assert not said or [without_figures(told)] == [without_figures(text) for text in said]


async def test_a_refusal_that_comes_late_is_still_answered(target: Target, gateway: str, tmp_path: Path) -> None:
    (script,) = (text for guide, text in blocks("python") if guide == "docs/streaming.md" and "RefusedError" in text)
    assert "asyncio.sleep(0.1)" in script
    (tmp_path / "example.py").write_text(
        here(script, target, gateway).replace("asyncio.sleep(0.1)", "asyncio.sleep(0)")
    )
    told = (await printed(sys.executable, "example.py", folder=tmp_path)).splitlines()
    assert [line.split()[:2] for line in told[:-1]] == [["3", "OUT_OF_RANGE"]]
    assert told[-1].strip()


@pytest.mark.parametrize("call", CALLS)
@secured.for_open_services
async def test_a_call_by_curl_is_answered(call: str, target: Target, gateway: str, tmp_path: Path) -> None:
    answer = json.loads(await printed("bash", "-c", here(call, target, gateway), folder=tmp_path))
    assert "error" not in answer, answer


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_command_is_answered(command: str, target: Target, tmp_path: Path) -> None:
    rachis = Path(sys.executable).with_name("rachis")
    assert (await printed(str(rachis), *shlex.split(command), "--address", target.address, folder=tmp_path)).strip()


def test_there_are_examples_of_each() -> None:
    assert len(SCRIPTS) >= 11
    assert len(CALLS) >= 2
    assert len(COMMANDS) >= 5
