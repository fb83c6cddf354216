"""Mechanisms that are asked for and cannot fire, and a service that is open, unreachable or about to be."""

from dataclasses import replace

from command_line.doctor.seen import Disk
from tests.pure.command_line.doctor.planted_workers import ALL, without_a_pool
from tests.pure.command_line.doctor.world import (
    DAY_S,
    GIB,
    NOW_S,
    PREFILL,
    Plant,
    Planted,
    both,
    configured,
    worker,
)

KEYED = {"security__keys_file": "/k.json", "security__secret_file": "/secret"}
CERTIFIED = {"security__certificate_file": "/c.pem", "security__certificate_key_file": "/c.key"}
NO_HOST_MEMORY = both(*(worker(name, load__total_host_blocks=0, tiers=None) for name in ALL))


def certificate_of(days: float) -> Plant:
    return lambda seen: replace(seen, certificate_ends_s=NOW_S + days * DAY_S)


def disk(free_gib: float, total_gib: int) -> Plant:
    return lambda seen: replace(seen, disks=[Disk("logs", "/tmp", int(free_gib * GIB), total_gib * GIB)])


def in_vain(key: str, says: str, **flags: object) -> Planted:
    return Planted("mechanisms", configured(**flags), key, says)


PLANTED = (
    Planted(
        "mechanisms",
        both(
            configured(placement__disaggregation="always", pools__prefill__workers=0),
            without_a_pool(PREFILL),
        ),
        "placement.disaggregation",
        "placement.disaggregation is always: it needs prefill workers",
    ),
    Planted(
        "mechanisms",
        both(*(worker(f"decode-{number}", registration__max_running_requests=1) for number in range(2))),
        "decode.policy",
        "decode.policy is heuristic: it chooses who decodes together",
    ),
    in_vain("decode.policy_folder", "decode.policy is none that learns", decode__policy_folder="/p"),
    in_vain("decode.chunk_tokens", "no prefix is ever found to be shared", decode__chunk_tokens=4097),
    Planted(
        "mechanisms",
        both(*(worker(name, registration__model__max_model_len=127) for name in ALL)),
        "index.chunk_tokens",
        "requests are placed by load alone",
    ),
    in_vain(
        "placement.replication",
        "placement.replication is true: it copies hot prefixes to further workers, and no pool has two",
        placement__replication=True,
        pools__prefill__workers=1,
        pools__decode__workers=1,
    ),
    Planted(
        "mechanisms",
        both(
            configured(objectives__tpot_s=0.03),
            worker("decode-1", registration__costs__decode_s=0.028, registration__costs__decode_s_per_request=0.003),
        ),
        "objectives.tpot_s",
        "objectives.tpot_s is 0.03: it is less than a step that decodes one request takes on any worker",
    ),
    *(
        in_vain(
            f"placement.{pool}_weights.{term}",
            "placement.policy hotness alone has",
            **{f"placement__{pool}_weights__{term}": 4.0, "placement__policy": "random"},
        )
        for pool, terms in (("prefill", ("ttft",)), ("decode", ("affinity", "pull", "room", "memory", "adapter")))
        for term in terms
    ),
    in_vain(
        "placement.replication_load",
        "only placement.policy hotness copies any",
        placement__replication_load=0.3,
        placement__policy="random",
    ),
    Planted(
        "mechanisms",
        both(configured(tiers__host_gib=0.0, streaming__preemption="swap"), NO_HOST_MEMORY),
        "streaming.preemption",
        "what is preempted is computed again",
    ),
    Planted(
        "mechanisms",
        both(configured(tiers__host_ratio=0.0, tiers__admission="everything"), NO_HOST_MEMORY),
        "tiers.admission",
        "tiers.host_gib gives none",
    ),
    in_vain("tiers.promotion", "where none come to be", tiers__promotion=True, tiers__admission="none"),
    in_vain(
        "pools.prefill.autoscale.enabled",
        "min_workers is max_workers",
        pools__prefill__autoscale__enabled=True,
        pools__prefill__autoscale__max_workers=1,
    ),
    in_vain(
        "pools.decode.autoscale.enabled",
        "min_workers is max_workers",
        pools__decode__autoscale__enabled=True,
        pools__decode__autoscale__max_workers=1,
    ),
    in_vain(
        "pools.shared.autoscale.enabled",
        "min_workers is max_workers",
        pools__shared__autoscale__enabled=True,
        pools__shared__autoscale__max_workers=1,
    ),
    in_vain(
        "placement.by_objectives.prefill_heavy",
        "by placement.policy objectives alone",
        placement__by_objectives__prefill_heavy=0.5,
    ),
    in_vain("redis.refresh_s", "only long after their leases", redis__refresh_s=5.0),
    in_vain("router.tenant_share", "without API keys there is one", router__tenant_share=0.5),
    in_vain("tracing.sample_rate", "without tracing.otlp_endpoint none are", tracing__sample_rate=0.5),
    Planted("exposure", configured(router__host="0.0.0.0", security__open=True), "router.host", "is 0.0.0.0 and there"),
    Planted(
        "exposure", configured(gateway__host="10.0.0.9", security__open=True), "gateway.host", "is 10.0.0.9 and there"
    ),
    Planted(
        "exposure", configured(router__admin_host="::", security__open=True), "router.admin_host", "is :: and there are"
    ),
    Planted(
        "encryption", configured(router__admin_host="::", **KEYED), "router.admin_host", "API keys travel as they are"
    ),
    Planted("encryption", configured(router__host="0.0.0.0", **KEYED), "router.host", "API keys travel as they are"),
    Planted("encryption", configured(gateway__host="0.0.0.0", **KEYED), "gateway.host", "API keys travel as they are"),
    Planted("certificate", certificate_of(-3), "security.certificate_file", "has ended 3 days ago"),
    Planted("certificate", certificate_of(13), "security.certificate_file", "ends in 13 days"),
    Planted(
        "gateway",
        lambda seen: replace(seen, gateway_error="http://127.0.0.1:8000/health: Connection refused"),
        "gateway",
        "do not answer: http://127.0.0.1:8000/health: Connection refused",
    ),
    Planted("disks", disk(2, 100), "/tmp", "almost full, 2.0 GiB are left: logs go there"),
    Planted("disks", disk(0.4, 10), "/tmp", "almost full, 0.4 GiB are left"),
)

WELL = {
    "an open service for its own machine": configured(),
    "keys and a certificate": configured(router__host="0.0.0.0", gateway__host="0.0.0.0", **KEYED, **CERTIFIED),
    "keys, for its own machine": configured(**KEYED),
    "no certificate": lambda seen: replace(seen, certificate_ends_s=None),
    "a certificate for another month": certificate_of(30),
    "a large disk with little of it left": disk(6, 1000),
    "replication by default, with nobody to copy to": configured(pools__prefill__workers=1, pools__decode__workers=1),
    "order of arrival, one at a time": both(
        configured(decode__policy="fcfs"),
        *(worker(f"decode-{number}", registration__max_running_requests=1) for number in range(2)),
    ),
    "a learned policy that is kept": configured(decode__policy="bandit", decode__policy_folder="/p"),
}
