"""What the engine's front end is told of a session's prompt when its input is closed."""

from types import SimpleNamespace
from typing import Any

import pytest

from cluster_core.engine_jobs import SessionMode
from kv_transfer import vllm_private
from prefill_worker.session_input import SessionInput
from prefill_worker.session_ledger import SessionLedger
from prefill_worker.streaming_request import LOADING
from worker_runtime.engine_sessions import SessionPrompt

OPENED = [1, 2, 3]


class Scheduler(SessionInput):
    """With one session, for which blocks are being loaded from host memory; without vLLM's part."""

    def __init__(self) -> None:
        self._sessions = {"s": SessionLedger(SessionMode.APPEND, 0.0)}
        self._late_input = {}
        waits: Any = SimpleNamespace(status=LOADING, prompt_token_ids=OPENED, _all_token_ids=list(OPENED))
        self.requests = {"s": waits}


def test_a_session_whose_blocks_are_being_loaded_is_told_with_the_prompt_that_it_will_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    # vLLM's front end is a whole engine's.
    monkeypatch.setattr(vllm_private, "expect_outputs", lambda _, request: told.append(request.prompt_token_ids))
    prompt = SessionPrompt.__new__(SessionPrompt)
    prompt.internal_id = "s"
    # Its constructor would open the session in an engine.
    prompt._engine, prompt._scheduler = None, Scheduler()
    # Made there from an engine's job.
    prompt._core_request = SimpleNamespace(prompt_token_ids=list(OPENED))

    prompt.take_in((4, 5), replaces=False)
    prompt.close((6,))

    assert told == [[1, 2, 3, 4, 5, 6]]
    assert prompt.length == 6


def test_what_is_appended_while_blocks_are_being_loaded_is_kept_once() -> None:
    """Not with a whole prompt for each append."""
    scheduler = Scheduler()
    for token in range(256):
        scheduler.extend_prompt("s", [token])
    # Nothing else tells what waits.
    assert sum(len(late.prompt) for late in scheduler._late_input["s"]) == len(OPENED) + 256
    ledger = scheduler.session_ledger("s")
    assert ledger is not None and (ledger.tokens.inputs, ledger.tokens.prompt_tokens) == (256, len(OPENED) + 256)
    assert scheduler.close_input("s", [7]) == [*OPENED, *range(256), 7]
