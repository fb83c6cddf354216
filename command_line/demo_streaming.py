"""`rachis demo --streaming`: one question whose pages are still being retrieved, answered without and with a session.

Left, the client waits for all pages and then asks; right, it sends each page as it comes. Then an update: retrieval
replaces a page after it was prefilled, and the answer is that of the new page. The two questions of the comparison
differ in their first sentence only, so that neither finds the other's KV in the prefix cache.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rachis import AsyncClient, chat_prompt
from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from builtin_model import recall
from builtin_model.vocabulary import VALUES
from cluster_configs.loading import LoadedConfig
from cluster_core.clock import monotonic_s
from command_line.output import out, print_json
from command_line.own_service import target_service
from control_plane.service.state import StateFile

PAGES = 12
# Two of them fit a terminal of 80 columns.
PANE_WIDTH = 39
PAGE_INTERVAL_S = 0.15
QUESTION_TOKENS = 3600
_SEED = 2026
_SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
_OPENING_TOKENS = 60


@dataclass(slots=True)
class Pane:
    """One side of the screen; also what is reported about it."""

    title: str
    pages: int = 0
    tokens_received: int = 0
    tokens_computed: int = 0
    first_token_s: float = 0.0
    opened_s: float = 0.0
    last_page_s: float = 0.0
    answer: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def ttft_from_open_ms(self) -> float:
        return (self.first_token_s - self.opened_s) * 1000

    @property
    def ttft_after_last_page_ms(self) -> float:
        return (self.first_token_s - self.last_page_s) * 1000

    def __rich__(self) -> Panel:
        rows = Table.grid(padding=(0, 1))
        rows.add_row("retrieved", ProgressBar(PAGES, self.pages, width=10), f"{self.pages}/{PAGES} pages")
        total = max(1, self.tokens_received)
        rows.add_row(
            "prefilled", ProgressBar(total, self.tokens_computed, width=10), f"{self.tokens_computed:,} tokens"
        )
        lines: list[Any] = [rows, "first token"]
        if self.first_token_s:
            lines.append(f"  {self.ttft_after_last_page_ms:>6,.0f} ms after the last page")
            lines.append(f"  {self.ttft_from_open_ms:>6,.0f} ms after the question")
        if self.answer:
            lines.append(f"answer     [bold]{self.answer}[/bold]")
        return Panel(Group(*lines, *self.notes), title=self.title, width=PANE_WIDTH)

    def report(self, right: str) -> dict[str, Any]:
        return {
            "answer": self.answer,
            "right": self.answer == right,
            "ttft_after_last_page_ms": round(self.ttft_after_last_page_ms, 1),
            "ttft_from_open_ms": round(self.ttft_from_open_ms, 1),
        }


async def demo_streaming(loaded: LoadedConfig, state_file: StateFile, *, as_json: bool) -> int:
    """Returns 0 when every answer is right, the session was faster, and the update changed the answer."""
    rng = random.Random(_SEED)
    question = recall.make_question(rng, QUESTION_TOKENS, fact_count=40)
    before, after = Pane("without streaming"), Pane("with streaming")
    first, second = Pane("before the update"), Pane("after an update of one page")
    async with (
        target_service(None, state_file, loaded, always_own=True) as target,
        AsyncClient(target.address) as client,
    ):
        await _warm_up(client, rng)
        with _live(before, after, as_json=as_json):
            await _ask_when_complete(client, question, _opening(rng), before)
            await _ask_while_retrieving(client, question, _opening(rng), after)
        changed = question.with_value(question.key, _other_value(rng, question.answer))
        with _live(first, second, as_json=as_json):
            opening = _opening(rng)
            await _ask_while_retrieving(client, question, opening, first)
            await _ask_with_update(client, question, changed, _opening(rng), second)
    return _verdict(question, changed, (before, after, first, second), as_json=as_json)


async def _ask_when_complete(client: AsyncClient, question: recall.RecallQuestion, opening: str, pane: Pane) -> None:
    pane.opened_s = monotonic_s()
    received = [opening]
    async for page in _retrieve(question, pane):
        received.append(page)
    messages = [{"role": "system", "content": "".join(received)}, {"role": "user", "content": question.question}]
    async for piece in client.stream(chat_prompt(messages), **_SAMPLING):
        _note_output(pane, piece)
    pane.tokens_computed = pane.tokens_received


async def _ask_while_retrieving(client: AsyncClient, question: recall.RecallQuestion, opening: str, pane: Pane) -> None:
    pane.opened_s = monotonic_s()
    async with client.session(_open_system_message(opening), mode="append", **_SAMPLING) as session:
        async for page in _retrieve(question, pane):
            await session.append(page)
            pane.tokens_computed = session.progress.ready_tokens
        async for piece in session.finish(_user_turn(question)):
            _note_output(pane, piece)
    pane.tokens_computed = pane.tokens_received


async def _ask_with_update(
    client: AsyncClient,
    stale: recall.RecallQuestion,
    fresh: recall.RecallQuestion,
    opening: str,
    pane: Pane,
) -> None:
    """All pages of the stale context, then one update to the fresh one."""
    pane.opened_s = monotonic_s()
    async with client.session(_open_system_message(opening), mode="update", **_SAMPLING) as session:
        async for page in _retrieve(stale, pane):
            await session.append(page)
            pane.tokens_computed = session.progress.ready_tokens
        await session.update(_pages(fresh))
        pane.last_page_s = monotonic_s()
        async for piece in session.finish(_user_turn(fresh)):
            _note_output(pane, piece)
    tokens = session.completion.session.tokens
    pane.tokens_computed = pane.tokens_received
    pane.notes.append(f"KV kept    {tokens.reused_tokens:,} tokens, {tokens.invalidated_tokens:,} dropped")


async def _warm_up(client: AsyncClient, rng: random.Random) -> None:
    """The first hand-off of a pair of workers takes longer: the engines shake hands."""
    await client.generate(chat_prompt(recall.make_question(rng, 200).messages), **_SAMPLING)


async def _retrieve(question: recall.RecallQuestion, pane: Pane) -> AsyncIterator[str]:
    """The pages of a context, as a slow retriever finds them."""
    for page in _pages(question):
        await asyncio.sleep(PAGE_INTERVAL_S)
        pane.pages += 1
        pane.tokens_received += len(page)
        pane.last_page_s = monotonic_s()
        yield page


def _pages(question: recall.RecallQuestion) -> list[str]:
    stated = [
        filler + fact.text for filler, fact in zip(question.fillers, (*question.facts, None), strict=True) if fact
    ] + [question.fillers[-1]]
    cuts = [index * len(stated) // PAGES for index in range(PAGES + 1)]
    return ["".join(stated[start:end]) for start, end in pairwise(cuts)]


def _opening(rng: random.Random) -> str:
    return "".join(recall.filler_sentences(rng, _OPENING_TOKENS))


def _open_system_message(opening: str) -> Any:
    return chat_prompt([{"role": "system", "content": opening}])


def _user_turn(question: recall.RecallQuestion) -> Any:
    return chat_prompt([{"role": "user", "content": question.question}])


def _other_value(rng: random.Random, value: str) -> str:
    return rng.choice([other for other in VALUES if other != value])


def _note_output(pane: Pane, piece: Any) -> None:
    if not pane.first_token_s:
        pane.first_token_s = monotonic_s()
    pane.answer = (pane.answer + getattr(piece, "text", "")).strip()


@contextmanager
def _live(left: Pane, right: Pane, *, as_json: bool) -> Iterator[None]:
    """Both panes side by side, redrawn while the block runs."""
    if as_json:
        yield
        return
    with Live(Columns([left, right], padding=(0, 1)), console=out, refresh_per_second=12):
        yield
    out.print()


def _verdict(
    question: recall.RecallQuestion, changed: recall.RecallQuestion, panes: Sequence[Pane], *, as_json: bool
) -> int:
    before, after, first, second = panes
    ratio = before.ttft_after_last_page_ms / after.ttft_after_last_page_ms
    reports = {
        "without": before.report(question.answer),
        "with": after.report(question.answer),
        "before_update": first.report(question.answer),
        "after_update": second.report(changed.answer),
    }
    right = all(report["right"] for report in reports.values())
    if as_json:
        print_json({**reports, "speedup_after_last_page": round(ratio, 2), "right": right})
    else:
        out.print(f"After the last page the first token came {ratio:.1f} times as early with streaming.")
        out.print(f"The update changed the answer from {first.answer} to {second.answer}.")
        out.print("All four answers are right." if right else "Not all answers are right.")
    return 0 if right and ratio > 1 else 1
