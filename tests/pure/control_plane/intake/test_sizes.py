"""What is larger than any prompt may be is refused by counting, before a list is made of it or a tokenizer reads it."""

import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import OutOfRangeError
from control_plane.intake import validation

MODEL = wire.ModelInfo(name="fake", vocabulary_size=256, max_model_len=512)
MOST_CHARACTERS = 512 * validation.MOST_CHARACTERS_PER_TOKEN


def chat(messages: int, characters: int = 1) -> generation.PromptInput:
    turns = [generation.ChatMessage(role="user", content="a" * characters)] * messages
    return generation.PromptInput(chat=generation.ChatMessages(messages=turns))


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (generation.PromptInput(token_ids=generation.TokenIds(ids=[1] * 512)), "prompt.token_ids"),
        (generation.PromptInput(text="a" * (MOST_CHARACTERS + 1)), "prompt.text"),
        (chat(validation.MAX_CHAT_MESSAGES + 1), "prompt.chat.messages"),
        (chat(100, MOST_CHARACTERS // 100 + 1), "prompt.chat.messages"),
    ],
    ids=["tokens", "text", "messages", "chat"],
)
def test_a_prompt_that_cannot_fit_is_refused_by_its_size(prompt: generation.PromptInput, field: str) -> None:
    with pytest.raises(OutOfRangeError) as caught:
        validation.check_prompt_form(prompt, MODEL)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "prompt",
    [
        generation.PromptInput(token_ids=generation.TokenIds(ids=[1] * 511)),
        generation.PromptInput(text="a" * MOST_CHARACTERS),
        chat(validation.MAX_CHAT_MESSAGES),
    ],
    ids=["tokens", "text", "messages"],
)
def test_what_may_fit_is_looked_at_further(prompt: generation.PromptInput) -> None:
    validation.check_prompt_form(prompt, MODEL)


@pytest.mark.parametrize(
    "pieces",
    [
        [api.SessionPiece(text="a")] * (validation.MAX_PIECES + 1),
        [api.SessionPiece(text="a" * 1000)] * (MOST_CHARACTERS // 1000 + 1),
        [api.SessionPiece(document=api.Document(content="a" * 1000))] * (MOST_CHARACTERS // 1000 + 1),
        [api.SessionPiece(token_ids=generation.TokenIds(ids=[1] * 100))] * 6,
    ],
    ids=["many", "text", "documents", "tokens"],
)
def test_an_update_that_cannot_fit_is_refused_by_its_size(pieces: list[api.SessionPiece]) -> None:
    with pytest.raises(OutOfRangeError) as caught:
        validation.check_pieces(pieces, MODEL, "update.context")
    assert caught.value.field == "update.context"


@pytest.mark.parametrize(("tokens", "top"), [(6242, 20), (65_537, 1), (131_073, 0)])
def test_a_prompt_has_log_probabilities_told_up_to_a_number(tokens: int, top: int) -> None:
    model = wire.ModelInfo(vocabulary_size=256, max_model_len=200_000)
    sampling = generation.SamplingParams(prompt_logprobs=top)
    validation.check_tokens([1] * (tokens - 1), sampling, model)
    with pytest.raises(OutOfRangeError, match="131072 are told") as refused:
        validation.check_tokens([1] * tokens, sampling, model)
    assert refused.value.field == "sampling.prompt_logprobs"
    validation.check_tokens([1] * tokens, generation.SamplingParams(), model)
