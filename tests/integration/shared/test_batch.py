"""`rachis batch` over a running gateway: every line has its answer, and what has one is not asked again."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration


async def batch(gateway: str, *files: Path) -> tuple[int, dict[str, Any]]:
    command = (sys.executable, "-m", "command_line.main", "batch", *map(str, files), "--base-url", gateway, "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return process.returncode or 0, json.loads(output.splitlines()[-1])


async def test_a_file_of_requests_is_answered_and_gone_on_with(gateway: str, tmp_path: Path) -> None:
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    bodies: list[dict[str, Any]] = [
        {"prompt": f"k1=blue; k{number}=red; k1=", "temperature": 0, "max_tokens": 2} for number in range(2, 12)
    ]
    # One that can never work.
    bodies.append({"prompt": "x", "temperature": -1})
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, told = await batch(gateway, questions, answers)
    assert (status, told["requests"], told["answered"], told["failed"]) == (1, 11, 10, 1)
    found = {line["custom_id"]: line["response"] for line in map(json.loads, answers.read_text().splitlines())}
    assert found.keys() == {str(number) for number in range(11)} and found["10"]["status_code"] == 400
    assert {found[str(number)]["body"]["choices"][0]["text"] for number in range(10)} == {"blue;"}

    # As if its writer had been killed in the middle of a line.
    with answers.open("a") as torn:
        torn.write('{"id": "batch_req_')
    status, told = await batch(gateway, questions, answers)
    assert (status, told["answered"], told["answered_before"], told["failed"]) == (1, 10, 10, 1)
    assert len(answers.read_text().splitlines()) == 12
