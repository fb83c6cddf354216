"""Parts of the gateway without a service: refusals, what the wire cannot say, streams that fail before they begin."""

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from rachis import AsyncClient
from rachis.errors import typed
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from vllm import __version__
from vllm.entrypoints.launchers.api_server import entry
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from cluster_configs.schema import MOST_SECONDS, RouterSection
from cluster_core.errors import InvalidInputError, OverloadedError, RachisError, StartError
from cluster_wire import calls
from control_plane.gateway import front, gateway, router_core
from control_plane.gateway.answer import Answer
from control_plane.gateway.failed_streams import EndedResponses
from control_plane.gateway.late_status import LateStatus
from control_plane.gateway.refusals import RouterRefused, as_vllm_error, headers_of
from control_plane.gateway.router_core import FAILURES, RouterCore
from control_plane.gateway.sampling import UNSUPPORTED, wire_sampling

pytestmark = pytest.mark.integration


def test_the_installed_vllm_is_the_one_whose_entry_points_were_read() -> None:
    assert __version__.split("+")[0] == front.SUPPORTED_VLLM
    asked = inspect.getsource(AsyncLLM)
    own = {name for name in vars(RouterCore) if name.endswith("_async")}
    assert {name for name in own if f"engine_core.{name}" in asked} == own
    assert "EngineCoreClient.make_async_mp_client" in asked


# Refusals.


def refused(
    code: grpc.StatusCode, trailing: Sequence[tuple[str, str | bytes]] = (), sentence: str = "a sentence"
) -> Exception:
    metadata = grpc.aio.Metadata(*trailing)
    return as_vllm_error(typed(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, sentence, None)))


@pytest.mark.parametrize(
    "code", ["INVALID_ARGUMENT", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL"]
)
def test_what_a_router_refuses_is_no_defect_of_the_gateway_and_no_line_of_its_log(code: str) -> None:
    assert isinstance(refused(grpc.StatusCode[code]), front.REFUSALS) is (code != "INTERNAL")
    assert issubclass(VLLMValidationError, front.REFUSALS)


def as_trailing(error: RachisError) -> list[tuple[str, str | bytes]]:
    return list(calls.trailing_metadata(error))


def test_bad_input_names_its_field() -> None:
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, as_trailing(InvalidInputError("is bad", field="sampling.top_p")))
    assert isinstance(error, VLLMValidationError)
    assert (error.parameter, headers_of(error)) == ("top_p", {})
    assert isinstance(refused(grpc.StatusCode.OUT_OF_RANGE), VLLMValidationError)
    compiled = InvalidInputError("Failed to parse it.", field="sampling.structured_outputs.regex")
    error = refused(grpc.StatusCode.INVALID_ARGUMENT, as_trailing(compiled), str(compiled))
    assert str(error) == "Failed to parse it."


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_what_is_not_the_clients_fault_says_when_to_try_again(code: grpc.StatusCode, status: int, path: str) -> None:
    error = refused(code, as_trailing(OverloadedError("full", retry_after_ms=2500)))
    assert isinstance(error, RouterRefused)
    answer = front.refusal(error, path)
    assert answer.status_code == status
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2500")
    assert headers_of(refused(code))["Retry-After"] == "1", "where the router does not say"


def test_a_defect_is_an_internal_error() -> None:
    assert isinstance(refused(grpc.StatusCode.INTERNAL), EngineGenerateError)
    assert front.refusal(refused(grpc.StatusCode.INTERNAL), "/v1/completions").status_code == 500


# Sampling.


def test_every_parameter_of_vllm_is_said_refused_or_the_fronts_own() -> None:
    fronts_own = {
        *("n", "detokenize", "output_kind", "skip_clone", "include_stop_str_in_output", "skip_special_tokens"),
        *("spaces_between_special_tokens", "flat_logprobs", "output_text_buffer_length", "stream_interval"),
        # Follows from `prompt_logprobs`; no request may say it.
        "skip_reading_prefix_cache",
        # Of what is refused itself.
        *("prompt_logprob_start", "routed_experts_prompt_start"),
    }
    lists: dict[str, Any] = {"stop": ["x"], "logit_bias": {1: 1.0}, "allowed_token_ids": [1], "bad_words": ["x"]}
    lists["structured_outputs"] = StructuredOutputsParams(regex="a")
    said = set(wire_sampling(SamplingParams(logprobs=1, prompt_logprobs=1, seed=1, **lists))) | {"max_tokens"}
    known = said | set(UNSUPPORTED) | fronts_own
    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert public - known == set()


def test_stop_strings_in_text_with_special_tokens_are_the_fronts_to_find() -> None:
    """An engine's text has none of these, and another place where the strings stand."""
    assert wire_sampling(SamplingParams(stop=["x"]))["stop"] == ["x"]
    assert "stop" not in wire_sampling(SamplingParams(stop=["x"], skip_special_tokens=False))


def test_defaults_ask_for_nothing_that_the_wire_cannot_say() -> None:
    assert wire_sampling(SamplingParams(max_tokens=3, top_k=-1)) | {"max_tokens": 3, "top_k": 0} == wire_sampling(
        SamplingParams(max_tokens=3)
    )


@pytest.mark.parametrize(
    "wishes",
    [
        {"prompt_logprobs": -1},
        {"extra_args": {"rachis_emitted": [1]}},
        {"logprobs": -1},
        {"structured_outputs": StructuredOutputsParams(json_object=True, whitespace_pattern=" ")},
        {"structured_outputs": StructuredOutputsParams(json_object=True, disable_any_whitespace=True)},
    ],
)
def test_what_the_wire_cannot_say_is_refused_by_name(wishes: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match=next(iter(wishes))):
        wire_sampling(SamplingParams(**wishes))


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": '{"type": "object"}'},
        {"json_object": True},
        {"regex": ""},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"structural_tag": "{}"},
    ],
)
def test_what_an_answer_has_to_be_goes_on_the_wire_as_its_kind(wanted: dict[str, Any]) -> None:
    said = wire_sampling(SamplingParams(structured_outputs=StructuredOutputsParams(**wanted)))
    assert said["structured_outputs"] == generation.StructuredOutputs(**wanted)


def test_a_schema_goes_on_the_wire_as_text() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "integer"}))
    assert wire_sampling(params)["structured_outputs"].json == '{"type": "integer"}'


# Answers.


class Router:
    """A client whose stream is these pieces, and then an error or nothing. wishes: what was asked for."""

    def __init__(self, *pieces: Any, error: Exception | None = None) -> None:
        self._pieces = pieces
        self._error = error
        self.wishes: dict[str, object] = {}

    async def stream(self, prompt: object, **wishes: object) -> AsyncIterator[Any]:
        self.wishes = wishes
        for piece in self._pieces:
            yield piece
        if self._error is not None:
            raise self._error


def piece(*tokens: int, ends: bool = False) -> generation.CompletionDelta:
    reason = generation.FINISH_REASON_STOP if ends else generation.FINISH_REASON_UNSPECIFIED
    return generation.CompletionDelta(token_ids=tokens, finish_reason=reason)


COMPLETION = generation.Completion(
    finish_reason=generation.FINISH_REASON_STOP, usage=generation.Usage(cached_tokens=32)
)


async def answered(router: Router, **sampling: Any) -> tuple[list[EngineCoreOutput], list[int], list[Exception]]:
    outputs: list[EngineCoreOutput] = []
    cached: list[int] = []
    failures: list[Exception] = []
    params = SamplingParams(max_tokens=9, **sampling)
    # vLLM sets this field, from the model's files.
    params._eos_token_id = 3
    request = SimpleNamespace(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling_params=params,
        cache_salt=None,
        priority=0,
        lora_request=None,
    )
    ended = asyncio.Event()
    answer = Answer(cast(Any, router), cast(Any, request), outputs.append, cached.append, failures.append)
    answer.on_end(ended.set)
    await asyncio.wait_for(ended.wait(), 10)
    return outputs, cached, failures


@pytest.mark.parametrize(
    ("last", "sampling", "told"),
    [
        (3, {}, (FinishReason.STOP, None)),
        (7, {"stop_token_ids": [7]}, (FinishReason.STOP, 7)),
        (7, {"stop": ["x"]}, (None, None)),
        (7, {}, (FinishReason.STOP, None)),
    ],
)
async def test_an_answer_ends_for_the_reason_that_vllm_would_have_given(
    last: int, sampling: dict[str, Any], told: tuple[FinishReason | None, int | None]
) -> None:
    outputs, cached, failures = await answered(Router(piece(5), piece(last, ends=True), COMPLETION), **sampling)
    first, second, *more = outputs
    assert (first.new_token_ids, first.finish_reason) == ([5], None)
    assert (second.new_token_ids, second.finish_reason, second.stop_reason) == ([last], *told)
    assert [each.finish_reason for each in more] == ([FinishReason.STOP] if told[0] is None else [])
    assert (cached, failures) == ([32], [])


async def test_how_long_an_answer_may_take_the_router_says() -> None:
    router = Router(piece(3, ends=True), COMPLETION)
    await answered(router)
    assert router.wishes["timeout_s"] == MOST_SECONDS
    longest = RouterSection(request_timeout_s=MOST_SECONDS).request_timeout_s
    assert longest == MOST_SECONDS
    with pytest.raises(ValidationError):
        RouterSection(request_timeout_s=MOST_SECONDS + 1)


@pytest.mark.parametrize("pieces", [(), (piece(5),), (piece(5), piece(7, ends=True))])
async def test_an_answer_that_the_router_ends_early_fails_and_nobody_waits(pieces: tuple[Any, ...]) -> None:
    _, _, failures = await answered(Router(*pieces))
    assert [str(each) for each in failures] == ["the router ended the answer early"]


async def test_whatever_ends_an_answer_is_told_to_who_waits() -> None:
    assert [type(each) for each in (await answered(Router(error=ValueError("a defect"))))[2]] == [ValueError]


def test_the_options_of_the_http_server_are_passed_on() -> None:
    taken = inspect.getsource(entry.build_and_serve)
    assert all(f"{name}=args.{name}" in taken for name in front._SERVER_OPTIONS)
    passed = {found for found in re.findall(r"(\w+)=args\.\1", taken) if found.startswith(("ssl", "h11", "enable_ssl"))}
    assert passed == set(front._SERVER_OPTIONS)


# Streams.


@pytest.mark.parametrize("kind", ["text/event-stream; charset=utf-8", "application/json"])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_that_fails_before_its_first_chunk_has_the_failures_status(kind: str, fails: bool) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})
        failures = FAILURES.get()
        assert failures is not None
        if fails:
            failures.append(ValueError("bad"))
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async def send(message: Any) -> None:
        sent.append(message)

    guarded = LateStatus(app, lambda error, path: JSONResponse({"said": str(error), "path": path}, status_code=418))
    await guarded({"type": "http", "path": "/v1/completions"}, None, send)

    bodies = b"".join(message.get("body", b"") for message in sent)
    if fails and kind.startswith("text/event-stream"):
        assert (sent[0]["status"], bodies) == (418, b'{"said":"bad","path":"/v1/completions"}')
    else:
        assert (sent[0]["status"], bodies) == (200, b"onetwo")


async def test_a_defect_of_vllms_own_code_ends_a_response_in_order(caplog: pytest.LogCaptureFixture) -> None:
    async def events() -> AsyncIterator[Any]:
        yield SimpleNamespace(type="response.in_progress", response=None)
        raise ZeroDivisionError("a defect")

    async def create_responses(request: Any, raw_request: Any) -> Any:
        return events()

    FAILURES.set([])
    ended = EndedResponses(SimpleNamespace(create_responses=create_responses))
    said = [event async for event in await ended.create_responses(None, cast(Any, None))]
    assert [event.type for event in said] == ["response.in_progress", "error"]
    assert (said[1].status, said[1].code, said[1].message, said[1].sequence_number) == (
        500, "server_error", "a defect", 1,
    )  # fmt: skip
    assert [type(failure) for failure in FAILURES.get() or ()] == [ZeroDivisionError], "it is the answer's status"
    assert [record.message for record in caplog.records] == ["a response failed in its stream"]


# The process.


def test_the_users_options_come_last_and_the_built_in_model_has_its_weights_here() -> None:
    model = api.ServedModel(name="m", tokenizer="builtin", max_model_len=77)
    arguments = [*gateway.front_arguments(model, "127.0.0.1", 8000), "--served-model-name", "mine"]
    assert arguments[1].endswith("weights")
    args = front.parsed(arguments)
    assert (args.served_model_name, args.max_model_len, args.port) == (["mine"], 77, 8000)


async def test_without_a_router_it_ends_with_a_sentence() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(StartError, match=r"no router with a worker was found within 0.2 s"):
            await gateway.served_model(client, 0.2)


@pytest.mark.parametrize(
    ("parses", "options", "is_refused"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"reasoning_ended": None}, True),
        (True, {"reasoning_ended": False}, True),
        (True, {"reasoning_ended": True}, False),
    ],
)
def test_a_grammar_that_vllm_would_not_begin_yet_is_refused(
    parses: bool, options: dict[str, Any], is_refused: bool
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    with pytest.raises(VLLMValidationError) if is_refused else nullcontext():
        # Reached over HTTP only with a parser that the model's vocabulary has the words for.
        router_core.refuse({"type": "token"}, params, options, parses_reasoning=parses)
    router_core.refuse({"type": "token"}, SamplingParams(), options, parses_reasoning=parses)
