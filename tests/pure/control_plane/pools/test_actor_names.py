"""By its name on Ray an actor is found, told from a stranger's, and known to fit or not."""

from dataclasses import replace

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import RachisConfig
from control_plane.pools.actor_names import ActorName, fitting, is_namesake, namespace, newest, settings_digest
from tests.fakes.cluster import DECODE, PREFILL
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.host import WorkerSettings

DEMAND = {"num_cpus": 0.5, "num_gpus": 0.0, "max_restarts": -1}


def settings(worker_id: str = "decode-0", **others: object) -> WorkerSettings:
    config = RachisConfig()
    engine = EngineSettings(
        config.model, config.engine, config.handoff, EngineRole.DECODE, config.streaming, "", config.tiers,
        config.decode, config.index,
    )  # fmt: skip
    plain = WorkerSettings(worker_id, "chat", engine, "redis://here", 5.0, 1 << 20, 300.0)
    return replace(plain, **others)  # type: ignore[arg-type]


def test_a_name_is_read_as_it_was_written() -> None:
    name = ActorName.of(settings("prefill-12"), DEMAND)
    assert ActorName.parse(str(name)) == name
    assert (name.worker_id, name.pool) == ("prefill-12", PREFILL)


def test_a_service_is_one_of_its_name_and_its_redis() -> None:
    here, there = namespace("chat", "redis://:a@here"), namespace("chat", "redis://:a@there")
    assert here != there and "redis" not in here
    assert is_namesake(there, "chat", "redis://:a@here")
    assert not is_namesake(here, "chat", "redis://:a@here")
    assert not is_namesake(namespace("chat-2", "redis://:a@there"), "chat", "redis://:a@here")


@pytest.mark.parametrize("stranger", ["", "decode-0", "a:b:c", "decode-0:1:2:3", "SERVE_CONTROLLER_ACTOR", "-1:a:b"])
def test_a_stranger_s_name_is_none_of_a_service(stranger: str) -> None:
    assert ActorName.parse(stranger) is None


def test_workers_of_one_configuration_have_one_digest_and_another_redis_or_engine_makes_another() -> None:
    engine = settings().engine
    others = [
        settings(redis_url="redis://there"),
        settings(engine=replace(engine, role=EngineRole.PREFILL)),
        settings(engine=replace(engine, engine=engine.engine.model_copy(update={"block_size_tokens": 128}))),
        settings(orphan_s=60.0),
    ]
    digests = [settings_digest(each, DEMAND) for each in others]
    plain = settings_digest(settings(), DEMAND)
    assert settings_digest(settings("decode-1"), dict(reversed(DEMAND.items()))) == plain
    digests.append(settings_digest(settings(), {**DEMAND, "num_gpus": 1.0}))
    assert len({plain, *digests}) == 2 + len(others)


def test_of_two_starts_of_one_worker_the_later_one_counts() -> None:
    first = ActorName("decode-0", "0001-ff", "b")
    second, other = replace(first, start="0002-00", settings="a"), ActorName("decode-1", "0000-00", "a")
    assert newest([second, first, other]) == {second, other}
    assert second.pool == DECODE


def test_workers_of_a_kind_that_the_service_has_no_more_and_of_other_settings_are_not_taken_over() -> None:
    stays, former = ActorName("shared-0", "0001-ff", "a"), ActorName("decode-0", "0001-ff", "a")
    other = ActorName("shared-1", "0001-ff", "b")
    assert fitting([stays, former, other], {wire.POOL_SHARED: "a"}) == {stays}
