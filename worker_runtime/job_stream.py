"""One job on its way through an engine: the engine's thread writes it, its consumer on the asyncio loop reads it.

job, items, session     made on the loop; `items` and `session` are written on the loop only, on the thread's behalf
taken                   the loop's
all else                the thread's
"""

from dataclasses import dataclass
from typing import Protocol

from cluster_core.engine_jobs import EngineJob, EngineOutput, SessionProgress
from cluster_core.errors import InvalidInputError, UnavailableError
from worker_runtime.engine_sessions import SessionPrompt


class Items(Protocol):
    """Takes what comes of a job: a queue, or the way to one in another process."""

    def put_nowait(self, item: EngineOutput | Exception, /) -> None: ...


class SessionReports(Protocol):
    """Hears how far a session is."""

    # The engine's thread's own: what it has reported last.
    reported: SessionProgress | None

    def report(self, progress: SessionProgress) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class JobStream:
    job: EngineJob
    items: Items
    session: SessionReports | None = None
    # The consumer has taken the last output.
    taken: bool = False
    # The thread has made the last output.
    ended: bool = False
    # vLLM's own name for the request.
    internal_id: str = ""
    prompt: SessionPrompt | None = None
    # An output has been made.
    started: bool = False
    # What the client has already seen of the first token's text.
    skip_chars: int = 0
    # Of the prompt, in the prefix cache or pulled; and of those, pulled.
    found_tokens: int = 0
    pulled_tokens: int = 0


def ended_badly(stream: JobStream, how: str) -> Exception:
    """vLLM ends a request with an error where its grammar takes nothing that could be sampled."""
    job = stream.job
    if job.sampling.structured_outputs is None:
        return UnavailableError(f"the engine ended the request with `{how}`")
    if job.emitted is not None and not stream.started:
        return InvalidInputError("is nothing that `structured_outputs` takes", field="emitted")
    return InvalidInputError("no token satisfies it and the other options", field="sampling.structured_outputs")
