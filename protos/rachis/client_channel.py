"""What a client's calls go through: where nothing could come of them they say so, once it is closed and after a fork.

gRPC's threads are not in a process that was forked, and none start there while it has a channel from before: a call
would wait for ever, whatever its deadline.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any

import grpc

from rachis.errors import FORKED, ClosedError
from rachis.metadata_channel import MetadataChannel


class _Channels:
    """Of clients, in this process and since before it was forked."""

    def __init__(self) -> None:
        self._left = weakref.WeakSet[grpc.aio.Channel]()
        self._are_cut_off = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def add(self, channel: grpc.aio.Channel) -> None:
        self._left.add(channel)

    def check(self) -> None:
        """Raises ClosedError where a fork has left no channel of this process any use."""
        if self._are_cut_off:
            raise ClosedError(FORKED)

    def _after_fork(self) -> None:
        self._are_cut_off = self._are_cut_off or bool(self._left)


_CHANNELS = _Channels()


def made(make: Callable[[], grpc.aio.Channel]) -> grpc.aio.Channel:
    """Raises ClosedError in a process that was forked from one that had a channel."""
    _CHANNELS.check()
    channel = make()
    _CHANNELS.add(channel)
    return channel


class ClientChannel(MetadataChannel):
    """Its calls raise ClosedError where they cannot be made."""

    def _with_metadata(self, method: Any) -> Callable[..., Any]:
        with_metadata = super()._with_metadata(method)

        def call(*arguments: Any, **options: Any) -> Any:
            _CHANNELS.check()
            try:
                return with_metadata(*arguments, **options)
            except grpc.aio.UsageError:
                raise ClosedError from None

        return call
