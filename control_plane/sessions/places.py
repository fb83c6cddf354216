"""What a streaming session takes of a router: one of the sessions that may be open, and a slot while it has work.

A session that waits for its client's next input computes nothing, and keeps nobody from the router: it gives its slot
back, and takes one again for what comes next. One whose prompt may be replaced does so once its worker has taken in
what came, which is computed when the engine has nothing else to do, or never. One that has lost its worker meanwhile is
computed again elsewhere, which nobody has asked for: that waits until a slot is free that nobody else wants, or until
its client says more. So a worker that drains neither fills the queue nor ends a session that finds it full. Its tenant
is charged for the time alone.
The number of open sessions is bounded, in all and for each client.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cluster_core.errors import OverloadedError
from cluster_core.tenant_shares import Claimant
from control_plane.intake.admission import Admission, Slot

_RETRY_AFTER_MS = 1000
# How often a session without a worker looks for a slot that is free.
_LOOK_S = 0.5


class OpenSessions:
    """Of one router. A client is a tenant, or in a service without keys whoever has its address."""

    def __init__(self, most: int, most_of_client: int) -> None:
        self._most = most
        self._most_of_client = most_of_client
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._of.total()

    @contextmanager
    def one_more(self, peer: str, tenant: str = "") -> Iterator[None]:
        """While a session of this peer is open. Raises OverloadedError where there are too many."""
        client = tenant or client_of(peer)
        if len(self) >= self._most:
            raise OverloadedError(
                f"{len(self)} sessions are open, the limit is streaming.max_open_sessions",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        if self._of[client] >= self._most_of_client:
            raise OverloadedError(
                f"{self._of[client]} sessions of this client are open, the limit is streaming.max_client_sessions",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._of[client] += 1
        try:
            yield
        finally:
            self._of[client] -= 1
            if not self._of[client]:
                del self._of[client]


def client_of(peer: str) -> str:
    """Of gRPC's name for a peer, what all connections of one client have in common: `ipv4:10.0.0.7:51234`."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class SessionSlot:
    """The slot of one session: held from an input until that is computed, or taken in where it may be replaced, and
    from `finish` to the end. tokens: that came since it was taken."""

    def __init__(self, admission: Admission, claimant: Claimant) -> None:
        self._admission = admission
        self._claimant = claimant
        self._slot: Slot | None = None
        # Set while one is held.
        self._is_held = asyncio.Event()
        self._waits = False
        # Whether one was ever held: a full queue refuses no session that goes on.
        self._goes_on = False

    async def hold(self, tokens: int) -> None:
        """Takes one where none is held, for so many tokens more. Raises OverloadedError."""
        if self._slot is not None:
            self._slot.tokens += tokens
            return
        self._waits = True
        try:
            self._keep(await self._admission.take(self._claimant, tokens, goes_on=self._goes_on))
        finally:
            self._waits = False

    async def hold_again(self) -> None:
        """Returns once one is held: one that is free, or that an input has waited for."""
        while self._slot is None:
            free = None if self._waits else self._admission.take_free(self._claimant)
            if free is not None:
                self._keep(free)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._is_held.wait()

    def _keep(self, slot: Slot) -> None:
        self._slot, self._goes_on = slot, True
        self._is_held.set()

    def give_back(self, generated_tokens: int = 0) -> None:
        """generated_tokens: of the answer, at the end."""
        slot, self._slot = self._slot, None
        self._is_held.clear()
        if slot is not None:
            slot.tokens += generated_tokens
            slot.release()
