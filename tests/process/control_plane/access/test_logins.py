"""From a key to who calls: what is hashed, what is remembered, and what a flood of wrong keys costs."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cluster_core.errors import OverloadedError, UnauthenticatedError
from control_plane.access.api_keys import ApiKey, HashedSecret, new_key, rotated
from control_plane.access.logins import Logins
from control_plane.access.roles import SERVICE, Role

HOME = "10.0.0.1"
UNKNOWN = f"rk-{'a' * 16}-{'b' * 43}"


def _almost(given: str) -> str:
    """The same id, and another secret."""
    return given[:-1] + ("A" if given[-1] != "A" else "B")


class World:
    def __init__(self) -> None:
        self.keys: dict[str, ApiKey] = {}
        self.time_s = 1000.0
        self.now_s = 0.0
        self.logins = Logins(
            lambda: self.keys, "rs-own", verify=self._verify, now_s=lambda: self.now_s, time_s=lambda: self.time_s
        )
        # Verification waits while it is held.
        self.gate = threading.Event()
        self.gate.set()

    def add(self, name: str = "chat", expires_s: float | None = None) -> str:
        key, given = new_key(
            name, "acme", [Role.GENERATE], lowest_priority=0, now_s=self.time_s, expires_s=expires_s
        )  # fmt: skip
        self.keys[key.key_id] = key
        return given

    @property
    def key(self) -> ApiKey:
        return next(iter(self.keys.values()))

    def _verify(self, hashed: HashedSecret, secret: str) -> bool:
        self.gate.wait()
        return hashed.fits(secret)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.gate.set()
    made.logins.close()


async def test_a_key_is_hashed_once_and_known_from_then_on(world: World) -> None:
    given = world.add()
    assert world.logins.known(given) is None
    first = await world.logins.login(given, HOME)
    assert (first.name, first.tenant) == ("chat", "acme")
    assert world.logins.known(given) == first == await world.logins.login(given, HOME)
    assert world.logins.hashed == 1


async def test_many_at_once_with_one_key_are_one_look(world: World) -> None:
    given = world.add()
    found = await asyncio.gather(*(world.logins.login(given, HOME) for _ in range(500)))
    assert {each.name for each in found} == {"chat"}
    assert world.logins.hashed == 1


async def test_a_key_that_is_revoked_is_not_known_any_more(world: World) -> None:
    given = world.add()
    await world.logins.login(given, HOME)
    world.keys.clear()
    assert world.logins.known(given) is None
    with pytest.raises(UnauthenticatedError):
        await world.logins.login(given, HOME)


async def test_a_key_that_is_revoked_while_it_is_hashed_is_not_let_in(world: World) -> None:
    given = world.add()
    world.gate.clear()
    login = asyncio.create_task(world.logins.login(given, HOME))
    await asyncio.sleep(0)
    world.keys.clear()
    world.gate.set()
    with pytest.raises(UnauthenticatedError):
        await login


async def test_a_key_that_expires_is_not_known_any_more(world: World) -> None:
    given = world.add(expires_s=1010.0)
    await world.logins.login(given, HOME)
    world.time_s = 1010.0
    assert world.logins.known(given) is None


async def test_the_secret_before_is_good_as_long_as_it_was_given(world: World) -> None:
    before = world.add()
    await world.logins.login(before, HOME)
    key, after = rotated(world.key, now_s=world.time_s, grace_s=5.0)
    world.keys[key.key_id] = key
    for given in (before, after):
        assert (await world.logins.login(given, HOME)).name == "chat"
    world.time_s += 5.0
    assert world.logins.known(before) is None and world.logins.known(after) is not None


async def test_what_is_wrong_is_not_said(world: World) -> None:
    good, expired = world.add(), world.add("old", expires_s=10.0)
    sentences = set()
    for given in ("", "x", f"{good[:-1]}!", _almost(good), expired, UNKNOWN):
        with pytest.raises(UnauthenticatedError) as raised:
            await world.logins.login(given, HOME)
        sentences.add(str(raised.value))
    assert len(sentences) == 1


async def test_an_unknown_key_costs_as_much_as_a_wrong_one(world: World) -> None:
    """One hash each; otherwise time would tell which ids there are."""
    good = world.add()
    for given in (_almost(good), UNKNOWN):
        before = world.logins.hashed
        with pytest.raises(UnauthenticatedError):
            await world.logins.login(given, HOME)
        assert world.logins.hashed == before + 1


async def test_ten_thousand_wrong_keys_from_one_address_cost_twenty_hashes(world: World) -> None:
    good = world.add()
    await world.logins.login(good, HOME)
    refused = 0
    for number in range(10_000):
        with pytest.raises((UnauthenticatedError, OverloadedError)) as raised:
            await world.logins.login(f"rk-{'a' * 16}-{number:043}", HOME)
        refused += isinstance(raised.value, OverloadedError)
    assert world.logins.hashed == 1 + 20 and refused == 10_000 - 20
    assert (await world.logins.login(good, HOME)).name == "chat", "who is known goes on being served"
    assert world.logins.refused == {"wrong_key": 20, "too_often": 9_980}


async def test_other_addresses_are_not_held_up_and_time_forgives(world: World) -> None:
    good = world.add()
    for number in range(25):
        with pytest.raises((UnauthenticatedError, OverloadedError)):
            await world.logins.login(f"rk-{'a' * 16}-{number:043}", HOME)
    with pytest.raises(OverloadedError, match="too many failed logins") as raised:
        await world.logins.login(good, HOME)
    assert raised.value.retry_after_ms
    assert (await world.logins.login(good, "10.0.0.2")).name == "chat"
    other = world.add("other")
    world.now_s += 1.0
    assert (await world.logins.login(other, HOME)).name == "other"


async def test_logins_that_succeed_use_nothing_up(world: World) -> None:
    for number in range(30):
        await world.logins.login(world.add(f"k{number}"), HOME)


async def test_few_wait_for_a_hash_and_the_others_are_told_when_to_come_back(world: World) -> None:
    world.gate.clear()
    waiting = [
        asyncio.create_task(world.logins.login(f"rk-{'a' * 16}-{number:043}", f"10.0.1.{number}"))
        for number in range(64)
    ]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="too many logins"):
        await world.logins.login(world.add(), HOME)
    world.gate.set()
    assert {type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {UnauthenticatedError}


async def test_who_goes_away_holds_nobody_up(world: World) -> None:
    given = world.add()
    world.gate.clear()
    first, second = (asyncio.create_task(world.logins.login(given, HOME)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    world.gate.set()
    assert (await second).name == "chat"


async def test_the_service_itself_is_known_by_its_own_key(world: World) -> None:
    assert world.logins.known("rs-own") is SERVICE
    assert world.logins.known("rs-other") is None
    assert world.logins.hashed == 0
