"""An answer leaves a draining decode worker: it takes its KV along where the worker hands it over in time.

Who holds the lease of an answer that is handed over:
    until its last message is read    nobody here: where that never is, it is released when the call ends
    from then on                      the journey
"""

import asyncio
from contextlib import suppress

from rachis.v1 import worker_pb2 as wire

from cluster_core.background import BackgroundTasks
from cluster_core.errors import RachisError
from control_plane.dispatch import journey_steps as steps
from control_plane.fleet.worker_client import DecodeCall, WorkerClient, WorkerLostError

# How long a draining worker may take to end an answer, and its last message to arrive after that.
HAND_OVER_S = 2.0
_LOOK_S = 0.1
_RELEASE_S = 5.0


class HandOver:
    """Of one Decode call."""

    def __init__(self, client: WorkerClient, call: steps.CallDecode, decode: DecodeCall) -> None:
        self._client = client
        self._call = call
        self._decode = decode
        self._asking = BackgroundTasks()
        self._is_asked = False
        self._is_read = False
        # A client that takes nothing keeps the call from being read.
        self._is_reading = True

    def begin(self, why: WorkerLostError) -> None:
        """The worker is asked; where the answer is not handed over in time, its reader gets `why`."""
        self._is_asked = True
        self._asking.start(self._ask(why))

    def read(self, message: wire.DecodeResponse) -> None:
        """This has come, and is given to the client next."""
        self._is_reading = False
        self._is_read = message.HasField("handed_over")

    def reads(self) -> None:
        """The client has it."""
        self._is_reading = True

    async def end(self) -> None:
        """The call is over."""
        await self._asking.cancel()
        if self._is_asked and not self._is_read:
            self._client.release_soon(self._call.worker, self._call.request_id, _RELEASE_S)

    async def _ask(self, why: WorkerLostError) -> None:
        try:
            with suppress(RachisError):
                if await self._client.hand_over(self._call.worker, self._call.request_id, HAND_OVER_S):
                    await self._unread()
        finally:
            self._decode.leave(why)

    async def _unread(self) -> None:
        """Returns once the last message has not come although it was waited for."""
        waited_s = 0.0
        while waited_s < HAND_OVER_S:
            await asyncio.sleep(_LOOK_S)
            waited_s += _LOOK_S * self._is_reading
