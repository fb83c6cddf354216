"""What a gateway writes of vLLM's and uvicorn's lines: no refusal, and nothing of what clients send or are told."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_core.event_log import LogRules, logged, look_first
from control_plane.gateway.front_log import FrontLog

SECRET = "what the client has asked"


class Refused(Exception):
    """In place of those of vLLM, and of ours that derive from them."""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "gateway-0.log"
    with logged("svc-1", "gateway", LogRules("DEBUG"), file):
        look_first(FrontLog((Refused,)))
        yield file


def lines(file: Path) -> list[str]:
    """Behind the first, which says whose log it is."""
    return file.read_text().splitlines()[1:]


@pytest.mark.parametrize("error", [Refused(SECRET), asyncio.CancelledError()])
def test_what_a_client_is_refused_is_no_line(error: BaseException, file: Path) -> None:
    try:
        raise error
    except BaseException as raised:
        logger = logging.getLogger("vllm.entrypoints.anthropic.api_router")
        logger.exception("Error in create_messages: %s", raised)
    assert not lines(file)


@pytest.mark.parametrize(
    ("level", "line", "told"),
    [
        (logging.ERROR, "ASGI callable returned without completing handshake.", ()),
        (logging.INFO, '%s - "WebSocket %s" %d', ("10.0.0.1:5", "/v1/responses", 401)),
        (logging.INFO, "connection rejected (%d %s)", (401, "Unauthorized")),
    ],
)
def test_a_handshake_that_is_refused_is_no_line(level: int, line: str, told: tuple[object, ...], file: Path) -> None:
    logging.getLogger("uvicorn.error").log(level, line, *told)
    assert not lines(file)


@pytest.mark.parametrize("part", ["entrypoints.openai.responses.harmony", "tool_parsers.poolside_v1", "renderers.hf"])
def test_lines_of_what_handles_texts_are_written_without_what_is_filled_in(part: str, file: Path) -> None:
    logging.getLogger(f"vllm.{part}").warning("Invalid JSON in a call: %s", SECRET)
    (line,) = lines(file)
    assert line.endswith("Invalid JSON in a call: %s")


def test_what_is_no_text_is_written_all_the_same(file: Path) -> None:
    logging.getLogger("a.library").warning(["a list"])
    assert lines(file)[0].endswith("['a list']")


def test_other_lines_are_written_as_they_are(file: Path) -> None:
    logging.getLogger("control_plane.gateway.adapters").warning("%s is not served", "pirate")
    (line,) = lines(file)
    assert line.endswith("pirate is not served")


def test_what_the_system_says_is_written(file: Path) -> None:
    try:
        raise OSError(24, "Too many open files")
    except OSError:
        logging.getLogger("asyncio").exception("socket.accept() out of system resource")
    said = lines(file)
    assert "socket.accept() out of system resource" in said[0]
    assert said[-1] == "  builtins.OSError: [Errno 24] Too many open files"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("asyncio", f"Task exception was never retrieved\nfuture: <Task exception=ValueError('{SECRET}')>"),
        ("vllm.tool_parsers.xlam_tool_parser", f"Error in streaming tool calls: {SECRET}"),
    ],
)
def test_what_a_defect_says_is_not_in_its_message_either(name: str, message: str, file: Path) -> None:
    try:
        raise ValueError(SECRET)
    except ValueError:
        logging.getLogger(name).exception(message)
    assert message[:20] in lines(file)[0]
    assert SECRET not in file.read_text()


def test_of_a_defect_it_is_written_what_was_raised_and_where_but_not_what_it_says(file: Path) -> None:
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise ValueError(SECRET) from cause
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
    said = lines(file)
    assert " ERROR " in said[0] and said[-1] == "  builtins.ValueError"
    assert "  builtins.KeyError" in said
    assert sum(f'File "{__file__}"' in line for line in said) == 2
    assert SECRET not in file.read_text()
