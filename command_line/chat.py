"""`rachis chat`: a chat with the model, at a terminal or from lines of standard input."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rachis import Client, Generated, RachisError, Session
from rachis.v1 import generation_pb2 as generation
from rich.markup import escape

from cluster_core.errors import ConfigError
from command_line import options
from command_line.chat_turns import Turns
from command_line.generate import as_table, summary
from command_line.output import err, out, print_json

_PROMPT, _MORE = "> ", ". "
_HELP = """/file PATH    the text of a file comes before your next message, and is computed while you type
/system TEXT  what the model is told before everything; without TEXT nothing
/reset        forget what was said
/stats        about the last answer: tokens, workers, times
/quit         end, as Ctrl-D does; Ctrl-C ends an answer

A line that ends with \\ goes on; // at the beginning stands for /."""


def register(app: typer.Typer) -> None:
    app.command("chat")(chat_command)


def chat_command(
    system: Annotated[str, typer.Option("--system", help="What the model is told before everything.")] = "",
    max_tokens: int = 1024,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    model: options.AskedModel = "",
    cache_salt: options.CacheSalt = "",
    timeout_s: float = 600.0,
    address: options.Addresses = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each answer.")] = False,
) -> None:
    """Chat with the model; /help says what else can be typed. Without a terminal each line is a message.

    The exit code is 1 then where one had no answer.
    """
    sampling: dict[str, Any] = {
        "max_tokens": options.whole_number(max_tokens, "--max-tokens"),
        "temperature": temperature,
        "top_p": top_p,
        "model": model,
        "cache_salt": cache_salt,
        "timeout_s": timeout_s,
    }
    if seed is not None:
        sampling["seed"] = options.whole_number(seed, "--seed", options.UINT64)
    with Client(options.running_address(address)) as client, Chat(client, sampling, as_json=as_json) as chat:
        chat.turns.system = system
        if sys.stdin.isatty() and not as_json:
            err.print("[dim]/help says what can be typed, Ctrl-D ends[/dim]")
        for text in _messages():
            if not chat.take(text):
                break
        # At a terminal somebody has read of it, and may have asked again.
        if chat.failed and not sys.stdin.isatty():
            raise typer.Exit(1)


@dataclass
class Chat:
    """One chat over one client. `take` handles what is typed; a session is open while a file waits for its message."""

    client: Client
    sampling: dict[str, Any]
    as_json: bool = False

    def __post_init__(self) -> None:
        self.turns = Turns()
        # Messages without an answer.
        self.failed = 0
        self._last: generation.Completion | None = None
        self._held = ExitStack()
        self._session: Session | None = None

    def __enter__(self) -> "Chat":
        return self

    def __exit__(self, *_: object) -> None:
        self._close_session()

    def take(self, text: str) -> bool:
        """A message or a command. False: the chat ends."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].partition(" ")
            return self._command(name, rest.strip())
        try:
            self._answer(text.removeprefix("/") if text.startswith("//") else text)
        except RachisError as error:
            self.failed += 1
            self._complain(f"{error.status}: {error}")
        return True

    def _command(self, name: str, rest: str) -> bool:
        if name == "quit":
            return False
        if name == "help":
            err.print(_HELP, markup=False)
        elif name == "reset":
            self._close_session()
            self.turns.reset()
        elif name == "system":
            self._close_session()
            self.turns.system = rest
        elif name == "stats":
            err.print(summary(self._last) if self._last is not None else "[dim]nothing was answered yet[/dim]")
        elif name == "file":
            self._add_file(rest)
        else:
            self._complain(f"/{name} is none of the commands; /help lists them, and // begins a message with a slash")
        return True

    def _add_file(self, path: str) -> None:
        try:
            page = Path(path).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            self._complain(f"{path or '/file'}: {getattr(error, 'strerror', None) or 'is no text'}")
            return
        added = self.turns.add_page(page)
        try:
            self._open_session().append(added)
        except (RachisError, RuntimeError) as error:
            # The message brings it again, and says what is wrong with it.
            self._close_session()
            err.print(f"[dim]not computed yet: {escape(str(error))}[/dim]")
        err.print(f"[dim]{len(page)} characters come before your next message[/dim]")

    def _open_session(self) -> Session:
        if self._session is None:
            self._session = self._held.enter_context(
                self.client.session(self.turns.open_prefix(), mode="append", **self.sampling)
            )
            for page in self.turns.pages[:-1]:
                self._session.append(page)
        return self._session

    def _close_session(self) -> None:
        self._session = None
        self._held.close()

    def _answer(self, text: str) -> None:
        """Streams it. What the model has said when it is interrupted, or fails, stays said."""
        answer = Generated()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                for piece in self._pieces(text):
                    if isinstance(piece, generation.Completion):
                        answer.completion = piece
                        continue
                    # What is remembered is what was shown.
                    with _interrupted_later():
                        answer.add(piece)
                        if not self.as_json:
                            out.print(piece.text, end="", markup=False)
        finally:
            self._close_session()
            if answer.token_ids:
                self.turns.answered(text, answer.text)
                self._last = answer.completion
                if not self.as_json:
                    out.print()
        if self.as_json:
            print_json(as_table(answer))

    def _pieces(self, text: str) -> Iterator[generation.CompletionDelta | generation.Completion]:
        """Of the session that has the files, where there is one; of a request with everything, where it is gone."""
        session, has_begun = self._session, False
        if session is not None:
            try:
                for delta in session.finish(text):
                    has_begun = True
                    yield delta
                yield session.completion
                return
            except (RachisError, RuntimeError):
                # Whoever types for long finds it closed.
                if has_begun:
                    raise
        yield from self.client.stream(self.turns.prompt(text), **self.sampling)

    def _complain(self, sentence: str) -> None:
        if self.as_json:
            print_json({"error": sentence})
        err.print("[bold red]error[/bold red]", escape(sentence))


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """An interrupt waits for the end of the block, where interrupts are not ignored."""
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(signal.SIGINT, None)


def _messages() -> Iterator[str]:
    """What is typed, without what is empty. Raises ConfigError for what is no text."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        # Arrow keys and a history of lines, for `input`.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            text = _whole(is_typed)
        except EOFError:
            if is_typed:
                err.print()
            return
        except KeyboardInterrupt:
            err.print()
            continue
        except UnicodeError:
            raise ConfigError("is not valid UTF-8", field="standard input") from None
        if text.strip():
            yield text


def _whole(is_typed: bool) -> str:
    """One message: a line, and those after it while they end with a backslash. Raises EOFError."""
    lines = [_line(_PROMPT, is_typed)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_line(_MORE, is_typed))
    return "\n".join(lines)


def _line(prompt: str, is_typed: bool) -> str:
    line = input(prompt if is_typed else "")
    # What was no text may come as what stands for it.
    line.encode()
    return line
