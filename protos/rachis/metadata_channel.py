"""A channel whose calls all bring the same metadata along: a key, say."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from rachis.errors import InvalidInputError

# gRPC takes some 8 KiB of metadata in all.
_MOST_CHARACTERS = 4096
Metadata = Sequence[tuple[str, str | bytes]]
# Of who calls for others and has no key of theirs: they are not whom its certificate names.
NO_KEY: Metadata = (("authorization", "Bearer"),)


class MetadataChannel:
    """What stubs ask of a channel, and no more."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = tuple(metadata)

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._with_metadata(self._channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._with_metadata(self._channel.unary_stream(*method, **options))

    def stream_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._with_metadata(self._channel.stream_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        return self._with_metadata(self._channel.stream_stream(*method, **options))

    def _with_metadata(self, method: Any) -> Callable[..., Any]:
        def call(*arguments: Any, metadata: Metadata = (), **options: Any) -> Any:
            return method(*arguments, metadata=(*self._metadata, *metadata), **options)

        return call


def key_metadata(api_key: str) -> Sequence[tuple[str, str]]:
    """Of who has that key, which may have come with a line's end; of nobody where it is empty.

    Raises InvalidInputError for what cannot be a key.
    """
    if not isinstance(api_key, str):
        raise InvalidInputError.local("is no text", "api_key")
    api_key = api_key.strip()
    if len(api_key) > _MOST_CHARACTERS or not api_key.isascii() or not api_key.isprintable():
        raise InvalidInputError.local(f"must be at most {_MOST_CHARACTERS} printable ASCII characters", "api_key")
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
