"""One start of one router in the simulation: the real one on local ports, until it is killed or stopped."""

from collections.abc import Callable
from typing import Any

from rachis.v1 import admin_pb2_grpc, router_pb2_grpc

from cluster_configs.loading import LoadedConfig
from cluster_core.background import BackgroundTasks
from cluster_core.ids import RequestId
from cluster_wire.redis_client import RedisClient
from control_plane.intake.tokenization import Tokenizer
from control_plane.model.job import Job
from control_plane.model.lifecycle import Event, RequestLifecycle, State
from control_plane.server.composition import RouterPorts, RouterTiming, build_router
from control_plane.server.router_server import RouterServer
from fault_sim.local_grpc.client import LocalChannel
from fault_sim.local_grpc.server import LocalServer
from fault_sim.local_grpc.transport import LocalTransport

CLIENT = "client"
# Nothing holds the loop up in virtual time.
_TIMING = RouterTiming(loop_look_s=3600.0)


class LocalRouter:
    """redis: makes its clients. make_job: in place of `Job`. on_end: told of each lifecycle that has ended."""

    def __init__(
        self,
        host: str,
        config: LoadedConfig,
        service_id: str,
        transport: LocalTransport,
        redis: Callable[[float], RedisClient],
        make_job: Callable[..., Job],
        on_end: Callable[[RequestLifecycle], None],
    ) -> None:
        self.host = host
        self.lifecycles: list[RequestLifecycle] = []
        self._transport = transport
        self._servers: list[LocalServer] = []
        self._channels: list[LocalChannel] = []
        self._is_gone = False
        self._ending = BackgroundTasks()
        router = self

        class Lifecycle(RequestLifecycle):
            def __init__(self, request_id: RequestId) -> None:
                super().__init__(request_id)
                router.lifecycles.append(self)

            def at(self, event: Event) -> State:
                state = super().at(event)
                if self.ended:
                    on_end(self)
                return state

        ports = RouterPorts(
            redis=redis,
            tokenizer=_WithoutFiles,
            server=self._server,
            channel=self._channel,
            endpoint=_NoEndpoint,
            lifecycle=Lifecycle,
            job=make_job,
        )
        self.server: RouterServer = build_router(config, service_id, ports, _TIMING)

    async def start(self) -> None:
        await self.server.start()
        channel: Any = self._transport.channel(CLIENT, self.server.address)
        self.api: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        self.admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)

    async def stop(self) -> None:
        await self.server.stop()

    def kill(self) -> None:
        """Without a word: what it still does reaches nobody."""
        self._is_gone = True
        for server in self._servers:
            server.kill()
        for channel in self._channels:
            channel.kill()
        self._ending.start(self.server.stop())

    async def ended(self) -> None:
        """Once all of a killed one has."""
        await self._ending.wait(60.0)

    @property
    def longest_wait_s(self) -> float:
        """For a client to read."""
        return max((server.longest_wait_s for server in self._servers), default=0.0)

    def _server(self, interceptors: Any = (), options: Any = None) -> Any:
        self._servers.append(self._transport.server(self.host, interceptors))
        return self._servers[-1]

    def _channel(self, address: str, options: Any = None) -> Any:
        self._channels.append(self._transport.channel(self.host, address))
        if self._is_gone:
            self._channels[-1].kill()
        return self._channels[-1]


class _WithoutFiles(Tokenizer):
    """Prompts are tokens already."""

    async def load(self) -> None:
        pass


class _NoEndpoint:
    """Metrics are counted and not served."""

    port = 0

    def __init__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass
