"""A router is made of its configuration and its ports: nothing runs, and each part has what it was given."""

from random import Random
from typing import Any, cast

from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import load
from cluster_wire import registry
from cluster_wire.redis_client import RedisClient
from control_plane.placement.objective_placer import ObjectivePlacer
from control_plane.server.composition import RouterPorts, build_router
from control_plane.server.router_server import RouterServer
from tests.fakes.registry import RegistryRedis


class Made:
    """A router, and what was asked of its ports while it was made."""

    def __init__(self, actors: Any = None, **flags: Any) -> None:
        self.clients: list[RegistryRedis] = []
        self.seeds: list[int] = []
        self.servers: list[dict[str, Any]] = []
        self.ports = RouterPorts(
            redis=self._client,
            actors=actors,
            now_s=lambda: 7.0,
            server=self._server,
            channel=self._channel,
            endpoint=self._channel,
            rng=self._rng,
        )
        self.router: RouterServer = build_router(load(flags=flags), "svc-test", self.ports)

    def _client(self, timeout_s: float) -> RedisClient:
        assert timeout_s > 0
        self.clients.append(RegistryRedis("svc-test"))
        return cast(RedisClient, self.clients[-1])

    def _rng(self, seed: int) -> Random:
        self.seeds.append(seed)
        return Random(seed)

    def _server(self, **options: Any) -> Any:
        self.servers.append(options)

    def _channel(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is called, listened to or served before the router starts")


async def test_every_part_that_speaks_to_redis_has_a_client_of_its_own() -> None:
    assert len(Made().clients) == 7, "registrations, claims, accesses, copies, loads, rates, adapters"
    assert len(Made(actors=object()).clients) == 9, "and the fence and the sizes of the pools"


async def test_pools_are_made_where_their_controller_runs() -> None:
    assert Made(actors=object()).router.parts.pools is not None
    alone = Made().router.parts
    assert alone.pools is None and alone.load_following is None


async def test_routers_are_told_what_prompts_take_for_roles() -> None:
    shared = {"pools.shared.workers": 4, "pools.prefill.workers": 0, "pools.decode.workers": 0}
    made = Made(**shared, **{"objectives.tpot_s": 0.05})
    parts = made.router.parts
    assert isinstance(parts.placer, ObjectivePlacer)
    parts.placer.roles.prompt(10.0, 7.0)
    for client in made.clients:
        client.is_whole = True
    await parts.sharing.share()
    fields = [await client.hgetall(registry.loads_key("svc-test")) for client in made.clients]
    [told] = [value for each in fields for value in each.values()]
    assert wire.RouterLoads.FromString(told).prefill_rate == parts.placer.told_roles().prefill_rate > 0


async def test_placement_chooses_with_the_configured_seed() -> None:
    assert Made(**{"placement.seed": 42}).seeds == [42]


async def test_what_is_hardly_longer_than_the_limit_is_refused_with_a_sentence_and_what_is_longer_not_received() -> (
    None
):
    ((server,),) = [Made(**{"router.max_message_mib": 3}).servers]
    assert dict(server["options"])["grpc.max_receive_message_length"] == 4 << 20


async def test_parts_measure_with_the_clock_of_the_ports() -> None:
    parts = Made().router.parts
    assert parts.prefixes.claims.health().staleness_s == 0.0


async def test_a_router_without_pools_follows_no_load() -> None:
    await Made().router.follow_load()


async def test_a_model_without_a_tokenizer_is_heard_of_when_the_router_starts_not_when_it_is_made() -> None:
    assert Made(**{"model.path": "/nowhere"}).router.address == ""
