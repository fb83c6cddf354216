"""NIXL's agent as vLLM's connector uses it, without NIXL: nothing is read, and a transfer takes its modelled time.

All above it is real: handshakes, leases and their renewal, deadlines, and the word that blocks were pulled, which goes
from agent to agent as a message. Reads from an agent whose process has ended fail, as they do with NIXL: the connection
of the messages breaks. Names and signatures are those of `nixl._api.nixl_agent`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from cluster_core.clock import monotonic_s
from cluster_core.ports import PortRange, address_of, hold_port
from imitated_gpu.link import SharedLink

# Messages to an agent that is gone, or does not read: the oldest stay, vLLM's leases end by themselves.
_MOST_UNSENT = 10_000


@dataclass(frozen=True, slots=True)
class Transfer:
    """notice: for the agent that is read from, once it is over; empty when that has been told."""

    size: int
    descriptors: int
    agent: str
    notice: bytes


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Of one transfer, as NIXL has it: microseconds and bytes."""

    xferDuration: float  # noqa: N815 - NIXL's own name
    postDuration: float  # noqa: N815 - NIXL's own name
    totalBytes: int  # noqa: N815 - NIXL's own name
    descCount: int  # noqa: N815 - NIXL's own name


class _Outbox:
    """The connection to another agent."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.is_connected = False
        # It was connected, and is not any more: whoever it was will not come back under that name.
        self.is_lost = False
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_UNSENT)
        self._socket.setsockopt(zmq.IPV6, address.startswith("["))
        self._events = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"tcp://{address}")

    def look(self) -> None:
        """Takes note of what has happened to the connection."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            self.is_lost |= self.is_connected and event == zmq.EVENT_DISCONNECTED
            self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def send(self, message: bytes) -> None:
        self._socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close(linger=0)


class ImitatedNixlAgent:
    """Used by the engine's thread; agents are made known to it by the thread of the handshakes.

    link: of this worker. host, ports: where others find it.
    """

    def __init__(
        self,
        name: str,
        config: object,
        *,
        link: SharedLink,
        host: str,
        ports: PortRange | None,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._name = name
        self._link = link
        self._now_s = now_s
        self._address = address_of(host, hold_port(host, ports, "pools.ports"))
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.IPV6, ":" in host)
        self._inbox.bind(f"tcp://{self._address}")
        # Of other agents.
        self._addresses: dict[str, str] = {}
        self._outboxes: dict[str, _Outbox] = {}
        # Bytes of each descriptor of a list.
        self._lists: dict[int, tuple[str, NDArray[np.uint64]]] = {}
        self._transfers: dict[int, Transfer] = {}
        self._began_s: dict[int, float] = {}
        self._handles = 0

    def get_agent_metadata(self) -> bytes:
        return json.dumps({"name": self._name, "address": self._address}).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        agent = json.loads(metadata)
        self._addresses[agent["name"]] = agent["address"]
        return str(agent["name"])

    def remove_remote_agent(self, agent: str) -> None:
        self._addresses.pop(agent, None)
        outbox = self._outboxes.pop(agent, None)
        if outbox is not None:
            outbox.close()

    def check_remote_metadata(self, agent: str) -> bool:
        return agent in self._addresses and not self._outbox(agent).is_lost

    # Memory: its descriptors are rows of address, bytes and device.

    def get_reg_descs(self, descriptors: Any, memory: str) -> Any:
        return descriptors

    def get_xfer_descs(self, descriptors: Any, memory: str) -> NDArray[np.uint64]:
        return np.asarray(descriptors, dtype=np.uint64)

    def register_memory(self, descriptors: Any, backends: Sequence[str] = ()) -> None:
        """There is none."""

    def deregister_memory(self, descriptors: Any) -> None:
        """There is none."""

    def prep_xfer_dlist(self, agent: str, descriptors: NDArray[np.uint64]) -> int:
        handle = self._next_handle()
        self._lists[handle] = (agent, descriptors[:, 1])
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        self._lists.pop(handle, None)

    # Transfers.

    def make_prepped_xfer(
        self,
        operation: str,
        local: int,
        local_rows: Sequence[int],
        remote: int,
        remote_rows: Sequence[int],
        notif_msg: bytes = b"",
    ) -> int:
        handle = self._next_handle()
        size = int(self._lists[local][1][local_rows].sum())
        self._transfers[handle] = Transfer(size, len(local_rows), self._lists[remote][0], notif_msg)
        return handle

    def transfer(self, handle: int) -> str:
        """Raises KeyError for an agent that is not known."""
        self._outbox(self._transfers[handle].agent)
        self._began_s[handle] = self._now_s()
        self._link.begin(handle, self._transfers[handle].size, self._began_s[handle])
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        """DONE: the other side has been told. ERR: it has gone meanwhile."""
        transfer = self._transfers[handle]
        outbox = self._outbox(transfer.agent)
        if outbox.is_lost:
            return "ERR"
        if not outbox.is_connected or not self._link.is_over(handle, self._now_s()):
            return "PROC"
        if transfer.notice:
            outbox.send(transfer.notice)
            self._transfers[handle] = replace(transfer, notice=b"")
        return "DONE"

    def get_xfer_telemetry(self, handle: int) -> Telemetry:
        transfer = self._transfers[handle]
        took_s = self._now_s() - self._began_s[handle]
        return Telemetry(took_s * 1e6, 0.0, transfer.size, transfer.descriptors)

    def release_xfer_handle(self, handle: int) -> None:
        self._link.forget(handle, self._now_s())
        self._transfers.pop(handle, None)
        self._began_s.pop(handle, None)

    # Messages.

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        """Raises KeyError for an agent that is not known, zmq.Again where too many wait to be sent."""
        self._outbox(agent).send(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found: list[bytes] = []
        try:
            while True:
                found.append(self._inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            return {"": found} if found else {}

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _outbox(self, agent: str) -> _Outbox:
        outbox = self._outboxes.get(agent)
        if outbox is None:
            outbox = self._outboxes[agent] = _Outbox(self._context, self._addresses[agent])
        outbox.look()
        return outbox

    def _next_handle(self) -> int:
        self._handles += 1
        return self._handles
