"""`rachis chat`, from a pipe and at a terminal, against the real router over fake engines."""

import asyncio
import json
import os
import pty
import re
import sys
import termios
from pathlib import Path

from tests import ROOT
from tests.fakes.answers import session_text
from tests.fakes.cluster import Cluster, named, until

# Of what `termios.tcgetattr` gives.
_LOCAL_FLAGS = 3
COMMAND = (sys.executable, "-m", "command_line.main", "chat", "--max-tokens", "8")


async def chat(cluster: Cluster, typed: bytes, *more: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *more,
        "--address",
        cluster.router.address,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(typed), 120)
    return process.returncode or 0, out.decode(), err.decode()


async def test_each_line_is_a_message_and_the_chat_remembers(cluster: Cluster) -> None:
    cluster.calls += 2
    code, out, err = await chat(cluster, b"hello\n\nagain\n")
    first = session_text("hello")
    second = session_text(f"hello{first}again")
    assert (code, out, err) == (0, f"{first}\n{second}\n", "")


async def test_a_file_is_computed_before_its_message(cluster: Cluster, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text("a page\n")
    cluster.calls += 2
    code, out, err = await chat(cluster, f"/file {page}\nwhat?\nand?\n/stats\n/quit\nnever\n".encode(), "--system", "s")
    # Each message of a session's chat ends with a new line here.
    first = session_text("s\na page\n\nwhat?\n")
    second = session_text(f"sa page\n\nwhat?{first}and?")
    assert (code, out) == (0, f"{first}\n{second}\n")
    assert "7 characters come before your next message" in err
    assert "prompt tokens" in err


async def test_what_is_wrong_is_a_sentence_and_the_chat_goes_on(cluster: Cluster) -> None:
    cluster.calls += 2
    typed = b"/nothing\n/file /nowhere/at/all\n/file\n/system\n/reset\n/help\n" + b"x" * 600 + b"\nhello\n"
    code, out, err = await chat(cluster, typed)
    assert (code, out) == (1, f"{session_text('hello')}\n"), "a message had no answer"
    assert "Traceback" not in err
    for sentence in ("/nothing is none", "No such file", "is a directory", "OUT_OF_RANGE", "/reset"):
        assert sentence.lower() in err.lower(), err


async def test_a_script_hears_of_a_message_without_an_answer_and_not_of_a_command(cluster: Cluster) -> None:
    cluster.calls += 3
    too_long = b"x" * 600
    assert (await chat(cluster, too_long + b"\n/quit\n", "--json"))[0] == 1
    assert (await chat(cluster, too_long))[0] == 1
    assert (await chat(cluster, b"/nothing\nhello\n"))[0] == 0


async def test_a_line_may_go_on_and_begin_with_a_slash(cluster: Cluster) -> None:
    cluster.calls += 1
    code, out, _ = await chat(cluster, b"//etc \\\nmore\n")
    assert (code, out) == (0, session_text("/etc \nmore") + "\n")


async def test_machines_get_an_object_for_each_answer(cluster: Cluster) -> None:
    cluster.calls += 2
    code, out, _ = await chat(cluster, b"hello\n/nothing\nagain\n", "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [set(each) >= {"text", "usage"} for each in found] == [True, False, True]
    assert found[0]["text"] == session_text("hello")


async def test_no_service_and_no_text_are_sentences(cluster: Cluster) -> None:
    code, out, err = await chat(cluster, b"\xff\xfe\n")
    assert (code, out) == (2, "")
    assert "UTF-8" in err
    assert "Traceback" not in err


async def test_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(cluster: Cluster) -> None:
    """The decode engine stops before its answer is whole: nothing but the interrupt ends it."""
    mine, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    # An interrupt would have the terminal forget what has been shown and is not read yet.
    attributes[_LOCAL_FLAGS] |= termios.NOFLSH
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    shown = bytearray()
    asyncio.get_running_loop().add_reader(mine, lambda: shown.extend(_read(mine)))
    engine = named(cluster, "decode-0").engine
    engine.hold_before(3)
    cluster.calls += 2
    process = await asyncio.create_subprocess_exec(
        # Whoever runs the tests in the background may have interrupts ignored, which is inherited.
        *("env", "--default-signal=INT", "setsid", "--ctty", *COMMAND, "--address", cluster.router.address),
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    await until(lambda: shown.count(b"> ") == 1)
    os.write(mine, b"hello\n")
    await engine.held.wait()
    # The engine is held before the client has shown what came before.
    await until(lambda: re.search(rb"hello\r\n\w", shown) is not None)
    os.write(mine, b"\x03")
    await until(lambda: shown.count(b"> ") == 2)
    await until(lambda: not engine.status().load.running_requests)
    engine.resume()
    os.write(mine, b"again\n")
    await until(lambda: shown.count(b"> ") == 3)
    os.write(mine, b"\x04")
    assert await asyncio.wait_for(process.wait(), 60) == 0
    asyncio.get_running_loop().remove_reader(mine)
    os.close(mine)
    # What had been said when it was interrupted stays said.
    (parts,) = re.findall(rb"hello\r\n(\w+)\^C(\w*)", bytes(shown))
    begun = b"".join(parts).decode()
    assert session_text("hello").startswith(begun)
    assert f"{session_text(f'hello{begun}again')}\r\n".encode() in shown
    assert b"Traceback" not in shown


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        # Nobody has the other side open any more.
        return b""
