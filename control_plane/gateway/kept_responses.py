"""The responses that a connection can go on from: the latest ones, bounded by number and by bytes.

A response is kept as the whole conversation up to its end: the items of its input, those before it included, and the
items that it has put out. What continues it is asked as if all of them had been sent at once, so both get the same
tokens. Instructions are not carried over, as OpenAI says.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """items: the conversation to the response's end. size_bytes: of them as JSON."""

    response_id: str
    items: tuple[Item, ...]
    size_bytes: int


def kept(response_id: str, before: Sequence[Item], output: Sequence[Item] = ()) -> KeptResponse:
    """before: the whole input. output: the items of a response as its JSON has them."""
    items = (*before, *(_as_input(item) for item in output if _says_anything(item)))
    text = json.dumps(items, ensure_ascii=False, separators=(",", ":"))
    return KeptResponse(response_id, items, len(text.encode(errors="surrogatepass")))


class KeptResponses:
    """Of one connection. The latest stays whatever its size: its conversation is bounded by itself."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_id: OrderedDict[str, KeptResponse] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, response_id: str) -> KeptResponse | None:
        return self._by_id.get(response_id)

    def add(self, response: KeptResponse) -> None:
        """In place of the one of this id, where there is one; the oldest ones go."""
        self.remove(response.response_id)
        self._by_id[response.response_id] = response
        self.size_bytes += response.size_bytes
        while len(self._by_id) > self._max_responses or (self.size_bytes > self._max_bytes and len(self._by_id) > 1):
            self.remove(next(iter(self._by_id)))

    def remove(self, response_id: str) -> None:
        gone = self._by_id.pop(response_id, None)
        if gone is not None:
            self.size_bytes -= gone.size_bytes

    def check_invariants(self) -> None:
        assert self.size_bytes == sum(each.size_bytes for each in self._by_id.values())
        assert len(self._by_id) <= self._max_responses
        assert self.size_bytes <= self._max_bytes or len(self._by_id) == 1
        assert all(name == each.response_id for name, each in self._by_id.items())


def _says_anything(item: Item) -> bool:
    """An answer without text is a message without content, which no input may have."""
    return item.get("type") != "message" or bool(item.get("content"))


def _as_input(item: Item) -> Item:
    """Without log-probabilities: nobody reads them in an input."""
    content = item.get("content")
    if not isinstance(content, list):
        return item
    parts = [{name: value for name, value in part.items() if name != "logprobs"} for part in content]
    return {**item, "content": parts}
