"""How long the doctor's probes are, and where it looks around a router."""

from dataclasses import replace
from typing import Any

import pytest
from rachis.v1 import worker_pb2 as wire

from command_line.doctor import surroundings
from command_line.doctor.probing import MAX_TOKENS, MOST_PROMPT_TOKENS, prompt_tokens
from command_line.doctor.seen import Part, Probe
from command_line.doctor.surroundings import Place
from tests.pure.command_line.doctor.world import configured, healthy, index, worker

HERE, ELSEWHERE = Place("127.0.0.1", "7421", True), Place("10.0.0.7", "7421", False)
MUTUAL_TLS = {f"security__{name}_file": "/f" for name in ("certificate", "certificate_key", "client_ca")}
MODEL = wire.ModelInfo(max_model_len=131_072)


def test_a_probe_is_longer_than_what_is_kept_from_the_hand_off_for_being_short() -> None:
    seen = healthy()
    assert prompt_tokens(seen, MODEL) == seen.config.placement.local_prefill_tokens + 2 * 32 + 1


def test_a_probe_fills_blocks_and_a_chunk_of_the_index() -> None:
    seen = configured(placement__disaggregation="always")(healthy())
    assert prompt_tokens(seen, MODEL) == 128 + 2 * 32 + 1
    assert prompt_tokens(index(chunk_tokens=32)(seen), MODEL) == 2 * 32 + 2 * 32 + 1
    large = worker("decode-0", registration__block_size_tokens=512)(seen)
    assert prompt_tokens(large, MODEL) == 4 * 512 + 1


def test_a_probe_and_its_answer_fit_the_model_and_are_bounded() -> None:
    seen = configured(placement__local_prefill_tokens=1_000_000)(healthy())
    assert prompt_tokens(seen, MODEL) == MOST_PROMPT_TOKENS
    assert prompt_tokens(seen, wire.ModelInfo(max_model_len=100)) == 100 - MAX_TOKENS


@pytest.mark.parametrize(
    ("reason", "prefill", "is_local"),
    [
        ("always", "prefill-0", False),
        ("long_remainder", "", False),
        ("short_remainder", "", True),
        ("prefill_slow", "", True),
        ("prefill_down", "", True),
        ("", "", True),
        ("", "prefill-0", False),
    ],
)
def test_whether_a_probe_was_to_be_handed_off_says_its_router(reason: str, prefill: str, is_local: bool) -> None:
    probe = Probe(64, reason=reason)
    probe.route.prefill_worker_id = prefill
    assert probe.is_local is is_local


@pytest.mark.parametrize(
    ("listens", "reached"),
    [("0.0.0.0:9421", "10.0.0.7:9421"), ("[::]:9421", "10.0.0.7:9421"), ("127.0.0.1:9421", "127.0.0.1:9421")],
)
def test_what_listens_everywhere_is_reached_at_the_routers_host(listens: str, reached: str) -> None:
    assert surroundings.reached(listens, "10.0.0.7") == reached


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("127.0.0.1:7421", Place("127.0.0.1", "7421", True)),
        ("0.0.0.0:7421", Place("0.0.0.0", "7421", True)),
        ("[::1]:7421", Place("::1", "7421", True)),
        ("10.0.0.7:7421", Place("10.0.0.7", "7421", True)),
        ("10.0.0.8:7421", Place("10.0.0.8", "7421", False)),
        ("dns:///routers.example:7421", Place("routers.example", "7421", False)),
    ],
)
def test_where_a_router_is(address: str, place: Place) -> None:
    assert surroundings.place_of(address, own_address="10.0.0.7:7421") == place


@pytest.mark.parametrize(
    ("place", "flags", "why"),
    [
        (HERE, {"gateway__port": 0}, "which port was taken is not told"),
        (ELSEWHERE, {}, "it listens on 127.0.0.1 of another host"),
        (HERE, MUTUAL_TLS, "it asks for a certificate"),
    ],
)
async def test_a_gateway_that_cannot_be_asked_is_named(place: Place, flags: dict[str, Any], why: str) -> None:
    looked = await surroundings.with_gateway(place, configured(**flags)(healthy()))
    assert why in looked.missing[Part.GATEWAY]


async def test_a_gateway_that_is_not_configured_is_not_asked() -> None:
    looked = await surroundings.with_gateway(HERE, configured(gateway__port=None)(healthy()))
    assert Part.GATEWAY not in looked.missing and not looked.gateway_error


def test_disks_of_another_host_are_not_looked_at() -> None:
    assert Part.DISKS in surroundings.with_disks(ELSEWHERE, healthy()).missing
    assert surroundings.with_disks(HERE, replace(healthy(), disks=())).disks
