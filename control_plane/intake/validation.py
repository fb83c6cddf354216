"""What a client may ask for: every field of a request against its limit, before any worker hears of it. Pure."""

from collections.abc import Mapping, Sequence

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import InvalidInputError, NotSupportedError, OutOfRangeError, PermissionDeniedError
from control_plane.access.roles import Identity
from control_plane.model.limits import MAX_PRIORITY, MOST_ENTRIES, max_tokens_of

MAX_REQUEST_ID_CHARACTERS = 128
MAX_CACHE_SALT_CHARACTERS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
# Whose logits are changed, or that alone are allowed.
MAX_STEERED_TOKENS = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 64
# What an answer has to be, said in so many characters, or by so many texts.
MAX_STRUCTURED_CHARACTERS = 65_536
MAX_STRUCTURED_CHOICES = 1024
MAX_LOGPROBS = 20
# Log-probabilities of one prompt: an engine's thread makes them one by one.
MAX_PROMPT_LOGPROBS = 131_072
MAX_CHOICES = 16
# Of adapters, in a sentence.
_MOST_NAMES = 8
MAX_CHAT_MESSAGES = MOST_ENTRIES
# Of one `update`.
MAX_PIECES = MOST_ENTRIES
# No token stands for more: runs of spaces are the longest that vocabularies have.
MOST_CHARACTERS_PER_TOKEN = 128
CHAT_ROLES = ("system", "user", "assistant")

STRUCTURED_KINDS = tuple(field.name for field in generation.StructuredOutputs.DESCRIPTOR.fields)
_FINISH_REASONS = frozenset(generation.FinishReason.values())

# Field -> (lowest, lowest is allowed, highest).
_RANGES: dict[str, tuple[float, bool, float]] = {
    "temperature": (0, True, 2),
    "top_p": (0, False, 1),
    "min_p": (0, True, 1),
    "presence_penalty": (-2, True, 2),
    "frequency_penalty": (-2, True, 2),
    "repetition_penalty": (0, False, 1000),
    "max_tokens": (1, True, 2**31 - 1),
    "top_k": (0, True, 2**31 - 1),
    "logprobs": (0, True, MAX_LOGPROBS),
    "prompt_logprobs": (0, True, MAX_LOGPROBS),
    "seed": (0, True, 2**64 - 1),
    "min_tokens": (0, True, 2**31 - 1),
}


def is_request_id(request_id: str) -> bool:
    """Until it is refused, a request that brings anything else goes by the id that it had before."""
    return 0 < len(request_id) <= MAX_REQUEST_ID_CHARACTERS and request_id.isprintable()


def check_request_id(request_id: str, within: str = "") -> None:
    if request_id and not is_request_id(request_id):
        raise InvalidInputError(
            f"must be at most {MAX_REQUEST_ID_CHARACTERS} printable characters", field=f"{within}request_id"
        )


def check_cache_salt(salt: str, within: str = "") -> None:
    if len(salt) > MAX_CACHE_SALT_CHARACTERS or not salt.isprintable():
        raise InvalidInputError(
            f"must be at most {MAX_CACHE_SALT_CHARACTERS} printable characters", field=f"{within}cache_salt"
        )


def check_priority(priority: int, caller: Identity, within: str = "") -> None:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidInputError(
            f"must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {priority}", field=f"{within}priority"
        )
    if priority < caller.lowest_priority:
        raise PermissionDeniedError(
            f"must be at least {caller.lowest_priority} with the key `{caller.name}`, got {priority}",
            field=f"{within}priority",
        )


def check_model(asked: str, served: str, adapters: Mapping[str, wire.Adapter], within: str = "") -> wire.Adapter | None:
    """The adapter that is asked for; None: the model alone. adapters: by name."""
    if not asked or asked == served:
        return None
    if asked not in adapters:
        known = ", ".join(f"`{name}`" for name in (served, *sorted(adapters)[:_MOST_NAMES]))
        more = f" and {len(adapters) - _MOST_NAMES} more adapters" if len(adapters) > _MOST_NAMES else ""
        raise InvalidInputError(f"unknown model `{asked}`; this cluster serves {known}{more}", field=f"{within}model")
    return adapters[asked]


def check_prompt_form(prompt: generation.PromptInput, model: wire.ModelInfo) -> None:
    """The prompt is there, in a form that can be turned into tokens, and not larger than any prompt may be.

    Only counts are looked at: what is too large costs nobody the time to read it.
    """
    form = prompt.WhichOneof("input")
    if form is None:
        raise InvalidInputError("one of text, token_ids or chat must be set", field="prompt")
    if form == "text" and not prompt.text:
        raise InvalidInputError("must not be empty", field="prompt.text")
    if form == "token_ids" and not prompt.token_ids.ids:
        raise InvalidInputError("must not be empty", field="prompt.token_ids")
    check_count(len(prompt.token_ids.ids), model, "prompt.token_ids")
    check_characters(len(prompt.text), model, "prompt.text")
    if form == "chat":
        check_chat(prompt.chat.messages, "prompt.chat.messages")
        check_characters(sum(len(each.content) for each in prompt.chat.messages), model, "prompt.chat.messages")


def check_chat(messages: Sequence[generation.ChatMessage], field: str) -> None:
    """There are messages, with known roles."""
    if not messages:
        raise InvalidInputError("must not be empty", field=field)
    if len(messages) > MAX_CHAT_MESSAGES:
        raise OutOfRangeError(f"at most {MAX_CHAT_MESSAGES} are taken, got {len(messages)}", field=field)
    for index, message in enumerate(messages):
        if message.role not in CHAT_ROLES:
            raise InvalidInputError(
                f"must be one of {', '.join(CHAT_ROLES)}, got `{message.role}`", field=f"{field}[{index}].role"
            )


def check_sampling(sampling: generation.SamplingParams, model: wire.ModelInfo, within: str = "") -> None:
    """`within` comes before the names of the fields in the errors."""
    for name, (lowest, allowed, highest) in _RANGES.items():
        value = getattr(sampling, name)
        # Written so that NaN fails it.
        inside = lowest <= value <= highest if allowed else lowest < value <= highest
        if sampling.HasField(name) and not inside:  # type: ignore[arg-type]
            bracket = "[" if allowed else "("
            raise InvalidInputError(f"must be in {bracket}{lowest}, {highest}], got {value}", field=_of(name, within))
    if sampling.min_tokens > max_tokens_of(sampling):
        raise InvalidInputError(
            f"must be at most max_tokens ({max_tokens_of(sampling)}), got {sampling.min_tokens}",
            field=_of("min_tokens", within),
        )
    _check_stops(sampling, model, within)
    _check_steered(sampling, model, within)
    if sampling.HasField("structured_outputs"):
        _check_structured(sampling.structured_outputs, _of("structured_outputs", within))


def check_tokens(token_ids: Sequence[int], sampling: generation.SamplingParams, model: wire.ModelInfo) -> None:
    """The tokens are the model's, and prompt and completion fit its length."""
    if not token_ids:
        raise InvalidInputError("has no tokens", field="prompt")
    check_vocabulary(token_ids, model, "prompt.token_ids")
    rows = len(token_ids) * (sampling.prompt_logprobs + 1)
    if sampling.HasField("prompt_logprobs") and rows > MAX_PROMPT_LOGPROBS:
        raise OutOfRangeError(
            f"{len(token_ids)} prompt tokens with {sampling.prompt_logprobs + 1} each are {rows} log-probabilities, at "
            f"most {MAX_PROMPT_LOGPROBS} are told",
            field="sampling.prompt_logprobs",
        )
    wanted = len(token_ids) + max_tokens_of(sampling)
    if wanted > model.max_model_len:
        raise OutOfRangeError(
            f"{len(token_ids)} prompt tokens and {max_tokens_of(sampling)} max_tokens are {wanted} together, "
            f"the model's length is {model.max_model_len}",
            field="prompt" if len(token_ids) >= model.max_model_len else _of("max_tokens"),
        )


def check_choices(n: int, sampling: generation.SamplingParams, received: Sequence[api.ReceivedAnswer]) -> None:
    """As many answers as may be, each with a seed of its own where there is one, and no more resumed than asked for."""
    if n > MAX_CHOICES:
        raise InvalidInputError(f"must be at most {MAX_CHOICES}, got {n}", field="n")
    largest = _RANGES["seed"][2]
    if sampling.HasField("seed") and sampling.seed + max(n, 1) - 1 > largest:
        raise InvalidInputError(f"with {n} choices the last one's is above {largest}", field=_of("seed"))
    if len(received) > max(n, 1):
        raise InvalidInputError(f"tells of {len(received)} choices, {max(n, 1)} are asked for", field="received")


def check_received(
    received: api.ReceivedAnswer,
    sampling: generation.SamplingParams,
    model: wire.ModelInfo,
    adapter: wire.Adapter | None,
    name: str,
) -> None:
    """What a client says that it has of an answer can be gone on with. adapter: what would. name: of the field."""
    count, most = len(received.token_ids), max_tokens_of(sampling)
    if count > most:
        raise InvalidInputError(f"has {count} tokens, max_tokens is {most}", field=f"{name}.token_ids")
    if count == most and not received.finish_reason:
        raise InvalidInputError(
            f"has {count} tokens, as many as max_tokens: the answer has ended, and its last piece says why",
            field=f"{name}.finish_reason",
        )
    if received.finish_reason not in _FINISH_REASONS:
        raise InvalidInputError(
            f"is none of those known here, got {received.finish_reason}", field=f"{name}.finish_reason"
        )
    if not count and (received.finish_reason or received.text_characters):
        raise InvalidInputError("must not be empty where anything of the answer came", field=f"{name}.token_ids")
    check_vocabulary(received.token_ids, model, f"{name}.token_ids")
    if count and received.adapter != (adapter.digest if adapter is not None else ""):
        raise InvalidInputError("the answer began with another adapter than has that name now", field=f"{name}.adapter")


def check_session_open(
    opened: api.SessionOpen, caller: Identity, model: wire.ModelInfo, adapters: Mapping[str, wire.Adapter]
) -> wire.Adapter | None:
    """Everything of `open` but the length of its prefix, which may be absent or, as text, empty."""
    check_request_id(opened.request_id, "open.")
    check_cache_salt(opened.cache_salt, "open.")
    check_priority(opened.priority, caller, "open.")
    adapter = check_model(opened.model, model.name, adapters, "open.")
    if opened.mode not in (generation.SESSION_MODE_APPEND, generation.SESSION_MODE_UPDATE):
        raise InvalidInputError("must be SESSION_MODE_APPEND or SESSION_MODE_UPDATE", field="open.mode")
    check_sampling(opened.sampling, model, "open.")
    if opened.sampling.HasField("prompt_logprobs"):
        raise NotSupportedError("a session's prompt has none", field="open.sampling.prompt_logprobs")
    check_received(opened.received, opened.sampling, model, adapter, "open.received")
    if max_tokens_of(opened.sampling) >= model.max_model_len:
        raise OutOfRangeError(
            f"{max_tokens_of(opened.sampling)} leaves no room for a prompt in the model's length of "
            f"{model.max_model_len}",
            field="open.sampling.max_tokens",
        )
    check_count(len(opened.prefix.token_ids.ids), model, "open.prefix.token_ids")
    check_characters(len(opened.prefix.text), model, "open.prefix.text")
    check_vocabulary(opened.prefix.token_ids.ids, model, "open.prefix.token_ids")
    if opened.prefix.HasField("chat"):
        check_chat(opened.prefix.chat.messages, "open.prefix.chat.messages")
    return adapter


def check_count(tokens: int, model: wire.ModelInfo, field: str) -> None:
    """So many tokens are no more than the model's length."""
    if tokens >= model.max_model_len:
        raise OutOfRangeError(f"{tokens} tokens, the model's length is {model.max_model_len}", field=field)


def check_characters(characters: int, model: wire.ModelInfo, field: str) -> None:
    """So much text may be a prompt of the model's length; tokenizing more would be for nothing."""
    most = model.max_model_len * MOST_CHARACTERS_PER_TOKEN
    if characters > most:
        raise OutOfRangeError(
            f"{characters} characters, the model's length of {model.max_model_len} tokens is at most {most}",
            field=field,
        )


def check_pieces(pieces: Sequence[api.SessionPiece], model: wire.ModelInfo, field: str) -> None:
    """Of one update."""
    if len(pieces) > MAX_PIECES:
        raise OutOfRangeError(f"at most {MAX_PIECES} are taken, got {len(pieces)}", field=field)
    check_count(sum(len(piece.token_ids.ids) for piece in pieces), model, field)
    check_characters(sum(map(_characters, pieces)), model, field)
    for index, piece in enumerate(pieces):
        check_piece(piece, model, f"{field}[{index}]")


def check_piece(piece: api.SessionPiece, model: wire.ModelInfo, field: str) -> None:
    if piece.WhichOneof("piece") is None:
        raise InvalidInputError("one of text, token_ids or document must be set", field=field)
    check_count(len(piece.token_ids.ids), model, f"{field}.token_ids")
    check_characters(_characters(piece), model, field)
    check_vocabulary(piece.token_ids.ids, model, f"{field}.token_ids")


def check_closing(closing: generation.PromptInput, prefix: generation.PromptInput, model: wire.ModelInfo) -> None:
    """May be absent or empty; chat messages go with chat messages only."""
    check_count(len(closing.token_ids.ids), model, "finish.closing.token_ids")
    check_characters(len(closing.text), model, "finish.closing.text")
    check_vocabulary(closing.token_ids.ids, model, "finish.closing.token_ids")
    if closing.HasField("chat"):
        if not prefix.HasField("chat"):
            raise InvalidInputError(
                "chat messages are taken only where the prefix is chat messages", field="finish.closing.chat"
            )
        check_chat(closing.chat.messages, "finish.closing.chat.messages")


def check_vocabulary(token_ids: Sequence[int], model: wire.ModelInfo, field: str) -> None:
    largest = max(token_ids, default=0)
    if largest >= model.vocabulary_size:
        raise OutOfRangeError(
            f"token {largest} is outside the vocabulary of {model.vocabulary_size} tokens", field=field
        )


def _characters(piece: api.SessionPiece) -> int:
    return len(piece.text) + len(piece.document.title) + len(piece.document.content)


def _check_stops(sampling: generation.SamplingParams, model: wire.ModelInfo, within: str) -> None:
    for name in ("stop", "stop_token_ids"):
        if len(getattr(sampling, name)) > MAX_STOP_STRINGS:
            raise InvalidInputError(f"at most {MAX_STOP_STRINGS} are taken", field=_of(name, within))
    for stop in sampling.stop:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidInputError(f"each must have 1 to {MAX_STOP_CHARACTERS} characters", field=_of("stop", within))
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        raise InvalidInputError(f"at most {MAX_BAD_WORDS} are taken", field=_of("bad_words", within))
    for word in sampling.bad_words:
        # A word of blanks alone has no tokens that could be avoided.
        if not word.strip() or len(word) > MAX_STOP_CHARACTERS:
            raise InvalidInputError(
                f"each must have 1 to {MAX_STOP_CHARACTERS} characters", field=_of("bad_words", within)
            )
    for token in sampling.stop_token_ids:
        if token >= model.vocabulary_size:
            raise OutOfRangeError(
                f"token {token} is outside the vocabulary of {model.vocabulary_size} tokens",
                field=_of("stop_token_ids", within),
            )


def _check_steered(sampling: generation.SamplingParams, model: wire.ModelInfo, within: str) -> None:
    for name in ("logit_bias", "allowed_token_ids"):
        tokens = list(getattr(sampling, name))
        if len(tokens) > MAX_STEERED_TOKENS:
            raise InvalidInputError(
                f"at most {MAX_STEERED_TOKENS} tokens are taken, got {len(tokens)}", field=_of(name, within)
            )
        check_vocabulary(tokens, model, _of(name, within))
    for token, bias in sampling.logit_bias.items():
        # Written so that NaN fails it.
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidInputError(
                f"must be in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], got {bias} for token {token}",
                field=_of("logit_bias", within),
            )


def _check_structured(wanted: generation.StructuredOutputs, name: str) -> None:
    """Of whether it compiles, `control_plane.intake.grammar_check` knows."""
    kinds = [field.name for field, _ in wanted.ListFields()]
    if len(kinds) != 1:
        raise InvalidInputError(
            f"exactly one of {', '.join(STRUCTURED_KINDS)} must be set, got {' and '.join(kinds) or 'none'}", field=name
        )
    (kind,) = kinds
    if kind == "json_object":
        if not wanted.json_object:
            raise InvalidInputError("must be true where it is set", field=f"{name}.{kind}")
        return
    if len(wanted.choice) > MAX_STRUCTURED_CHOICES:
        raise InvalidInputError(
            f"at most {MAX_STRUCTURED_CHOICES} texts are taken, got {len(wanted.choice)}", field=f"{name}.{kind}"
        )
    characters = sum(map(len, wanted.choice)) if kind == "choice" else len(getattr(wanted, kind))
    if characters > MAX_STRUCTURED_CHARACTERS:
        raise OutOfRangeError(
            f"at most {MAX_STRUCTURED_CHARACTERS} characters are taken, got {characters}", field=f"{name}.{kind}"
        )


def _of(name: str, within: str = "") -> str:
    return f"{within}sampling.{name}"
