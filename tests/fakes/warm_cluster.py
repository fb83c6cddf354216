"""A model of four lines, rendered and answered as vLLM and a router would: text is bytes, and so are tokens."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from rachis.errors import UnavailableError
from rachis.session import RefusedError
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from control_plane.gateway.client_events import SocketError
from control_plane.gateway.conversation import Event
from control_plane.gateway.kept_responses import Item
from control_plane.gateway.warm_prompt import CLIENT, Piece

# Of a request, as a router would be told.
LONGEST_S = 5000.0


def rendered(items: Sequence[Item]) -> list[int]:
    turns = "".join(f"<{item.get('role', item['type'])}>{_text(item)}</>" for item in items)
    return list(f"{turns}<answer>".encode())


def answer_to(token_ids: Sequence[int]) -> list[int]:
    """Depends on every token."""
    return list(f"{sum(place * token for place, token in enumerate(token_ids, 1)) % 99991}".encode())


def _text(item: Item) -> str:
    content = item.get("content", "")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class Renderer:
    """Stands for vLLM: renders, asks who answers, and makes events of what comes."""

    def __init__(self, client: Any, max_tokens: int = 4096) -> None:
        self._client = client
        self._max_tokens = max_tokens
        # As vLLM with `truncation: auto`.
        self.cuts_off = False
        self.asked = 0

    async def events(
        self, fields: Mapping[str, Any], items: Sequence[Item], previous_response_id: str | None, connection: Any
    ) -> AsyncIterator[Event]:
        tokens = rendered(items)
        if len(tokens) > self._max_tokens and not self.cuts_off:
            raise SocketError("is too long", code="invalid_value", param="input")
        self.asked += 1
        response_id = f"resp_{self.asked}"
        yield Event(f'{{"type": "response.created", "id": "{response_id}"}}', response_id)
        wishes = {"max_tokens": fields.get("max_output_tokens", 4096 - len(tokens)), "temperature": 0.0}
        wishes["timeout_s"] = LONGEST_S
        prompt = generation.PromptInput(token_ids=generation.TokenIds(ids=tokens))
        text = ""
        try:
            async for piece in (CLIENT.get() or self._client).stream(prompt, request_id=response_id, **wishes):
                if isinstance(piece, generation.CompletionDelta):
                    text += bytes(piece.token_ids).decode()
        except Exception as error:
            raise SocketError(str(error), code="server_error", status=500) from error
        is_stored = fields.get("store") is not False
        output = ({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},)
        frame = json.dumps({"type": "response.completed", "response": {"id": response_id, "text": text}})
        yield Event(frame, response_id, output, is_completion=True, is_stored=is_stored)

    def prepared(self, created: Event) -> Event:
        frame = json.dumps({"type": "response.completed", "response": {"id": created.response_id, "text": ""}})
        return Event(frame, created.response_id, is_completion=True)


class Session:
    """Of `Cluster`. Answers what it has been told."""

    def __init__(self, cluster: "Cluster", prefix: list[int], wishes: dict[str, Any]) -> None:
        self._cluster = cluster
        self.tokens = list(prefix)
        self.wishes = wishes
        self.refusals: list[RefusedError] = []
        self.ended = False
        self.completion = generation.Completion()

    async def __aenter__(self) -> "Session":
        if self._cluster.refuses_sessions:
            raise UnavailableError.local("no room")
        self._cluster.open.append(self)
        self._cluster.opened += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.ended = True
        if self in self._cluster.open:
            self._cluster.open.remove(self)

    async def append(self, piece: list[int]) -> None:
        if self._cluster.refuses_appends:
            self.refusals.append(RefusedError(api.SessionRefused(status="OUT_OF_RANGE", message="too long")))
            return
        self.tokens += piece
        self._cluster.appended += len(piece)

    async def finish(self, closing: list[int] | None = None) -> AsyncGenerator[generation.CompletionDelta, None]:
        if self._cluster.refuses_finish:
            raise RefusedError(api.SessionRefused(status="OUT_OF_RANGE", message="too long"))
        self._cluster.answered_by_sessions += 1
        for token in answer_to([*self.tokens, *(closing or ())]):
            yield generation.CompletionDelta(token_ids=[token])
            if self._cluster.loses_sessions:
                raise UnavailableError.local("the router is gone")
        self.completion = generation.Completion(finish_reason=generation.FINISH_REASON_STOP)


class Cluster:
    """Stands for the routers' client, with what it was asked."""

    def __init__(self) -> None:
        self.open: list[Session] = []
        self.opened = self.appended = self.answered_by_sessions = self.answered_plainly = 0
        self.refuses_sessions = self.refuses_appends = self.refuses_finish = self.loses_sessions = False

    def session(self, prefix: Any = None, *, mode: str = "append", **wishes: Any) -> Any:
        assert mode == "append"
        return Session(self, prefix, wishes)

    async def stream(self, prompt: generation.PromptInput, **wishes: Any) -> AsyncGenerator[Piece, None]:
        self.answered_plainly += 1
        for token in answer_to(prompt.token_ids.ids):
            yield generation.CompletionDelta(token_ids=[token])
        yield generation.Completion(finish_reason=generation.FINISH_REASON_STOP)
