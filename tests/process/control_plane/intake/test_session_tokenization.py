"""A session's frame and pieces with the built-in model's tokenizer: together they are the whole prompt's tokens."""

import json
import random
import subprocess
import sys

import pytest
from rachis import chat_prompt
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from builtin_model import WEIGHTS, recall
from cluster_core.errors import InvalidInputError
from control_plane.intake.tokenization import Frame, Tokenizer, document_text


@pytest.fixture(scope="module")
async def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(str(WEIGHTS))
    await tokenizer.load()
    return tokenizer


def turns(*messages: tuple[str, str]) -> generation.PromptInput:
    return chat_prompt([{"role": role, "content": content} for role, content in messages])


def pages_of(question: recall.RecallQuestion) -> list[str]:
    """The context cut where tokens end: after each fact."""
    facts = zip(question.fillers, question.facts, strict=False)
    return [*(filler + fact.text for filler, fact in facts), question.fillers[-1]]


async def tokens_of(tokenizer: Tokenizer, pages: list[str]) -> list[int]:
    return [token for page in pages for token in await tokenizer.piece(api.SessionPiece(text=page))]


@pytest.mark.parametrize("seed", range(20))
async def test_system_text_first_documents_in_the_middle_question_last_are_the_tokens_of_the_whole_chat(
    tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    question = recall.make_question(rng, rng.randrange(50, 600))
    pages = pages_of(question)
    whole = await tokenizer.token_ids(chat_prompt(question.messages))

    prefix = turns(("system", pages[0]))
    opened = await tokenizer.frame(prefix)
    closed = await tokenizer.frame(prefix, turns(("user", question.question)).chat)

    assert closed.head == opened.head
    assert opened.head + await tokens_of(tokenizer, pages[1:]) + closed.tail == whole


@pytest.mark.parametrize("seed", range(20))
async def test_closing_text_goes_inside_the_open_message(tokenizer: Tokenizer, seed: int) -> None:
    question = recall.make_question(random.Random(seed), 200)
    whole = await tokenizer.token_ids(turns(("system", "recall."), ("user", question.text)))

    frame = await tokenizer.frame(turns(("system", "recall."), ("user", "")))
    pieces = await tokens_of(tokenizer, [*pages_of(question), question.question])

    assert frame.head + pieces + frame.tail == whole


async def test_several_messages_before_and_after_the_open_one_keep_their_places(tokenizer: Tokenizer) -> None:
    before = [("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "read ")]
    after = [("assistant", "done"), ("user", "k1=")]
    whole = await tokenizer.token_ids(turns(*before[:-1], ("user", "read this"), *after))

    frame = await tokenizer.frame(turns(*before), turns(*after).chat)

    assert frame.head + await tokens_of(tokenizer, ["this"]) + frame.tail == whole


async def test_a_text_prefix_is_tokenized_as_a_whole_prompt_is(tokenizer: Tokenizer) -> None:
    prefix = generation.PromptInput(text="k1=blue; ")

    assert await tokenizer.frame(prefix) == Frame(await tokenizer.token_ids(prefix), [])


async def test_token_ids_are_a_prefix_as_they_are(tokenizer: Tokenizer) -> None:
    prefix = generation.PromptInput(token_ids=generation.TokenIds(ids=[5, 6]))

    assert await tokenizer.frame(prefix) == Frame([5, 6], [])


async def test_without_a_prefix_nothing_stands_before_the_context(tokenizer: Tokenizer) -> None:
    assert await tokenizer.frame(generation.PromptInput()) == Frame([], [])


async def test_what_the_template_refuses_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInputError, match="the chat template refuses it"):
        await tokenizer.frame(turns(("robot", "hi")))


async def test_a_template_that_shows_the_open_message_twice_has_no_place_for_pieces(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = "{% for message in messages %}{{ message['content'] }}{{ message['content'] }}{% endfor %}"
    # The template belongs to the model's files, which all tests here share.
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", twice)

    with pytest.raises(InvalidInputError, match=r"open\.prefix\.chat: the chat template does not show where"):
        await tokenizer.frame(turns(("user", "hi")))


@pytest.mark.parametrize("text", ["", " ", "k1=blue; ", "üñí€🙂 ", "{{ braces }} ", "</s> "])
async def test_a_message_without_pieces_is_the_message(tokenizer: Tokenizer, text: str) -> None:
    frame = await tokenizer.frame(turns(("user", text)))

    assert frame.head + frame.tail == await tokenizer.token_ids(turns(("user", text)))


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (api.Document(title="t", content="c"), "t\nc\n\n"),
        (api.Document(content="c\n"), "c\n\n\n"),
        (api.Document(title="t"), "t\n\n\n"),
    ],
)
async def test_a_document_is_its_title_line_its_content_and_an_empty_line(
    tokenizer: Tokenizer, document: api.Document, text: str
) -> None:
    assert document_text(document) == text
    assert await tokenizer.piece(api.SessionPiece(document=document)) == await tokens_of(tokenizer, [text])


_OF_A_ROUTER = """
import asyncio, json, os, sys
from control_plane.intake.tokenization import Tokenizer
tokenizer = Tokenizer(sys.argv[1], beside_models=False)
asyncio.run(tokenizer.load())
leftovers = ["torch" in sys.modules, "TRANSFORMERS_NO_ADVISORY_WARNINGS" in os.environ]
print(json.dumps([tokenizer.encode(sys.argv[2]), *leftovers]))
"""


def test_a_process_that_runs_no_model_has_the_same_tokens_without_torch_and_without_a_warning(
    tokenizer: Tokenizer,
) -> None:
    text = recall.make_question(random.Random(1), 300).text
    command = [sys.executable, "-c", _OF_A_ROUTER, str(WEIGHTS), text]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = tokenizer.encode(text)
    assert (run.stderr, json.loads(run.stdout)) == ("", [expected, False, False])
