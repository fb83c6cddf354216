"""From a key to who calls: what is hashed, what is remembered, and what a flood of wrong keys costs."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cluster_core.errors import OverloadedError, UnauthenticatedError
from control_plane.access.api_keys import ApiKey, HashedSecret, new_key, rotated
from control_plane.access.logins import Logins
from control_plane.access.roles import SERVICE, Role

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
    first = await world.logins.login(given)
    assert (first.name, first.tenant) == ("chat", "acme")
    assert world.logins.known(given) == first == await world.logins.login(given)
    assert world.logins.hashed == 1


async def test_many_at_once_with_one_key_are_one_look(world: World) -> None:
    given = world.add()
    found = await asyncio.gather(*(world.logins.login(given) for _ in range(500)))
    assert {each.name for each in found} == {"chat"}
    assert world.logins.hashed == 1


async def test_a_key_that_is_revoked_is_not_known_any_more(world: World) -> None:
    given = world.add()
    await world.logins.login(given)
    world.keys.clear()
    assert world.logins.known(given) is None
    with pytest.raises(UnauthenticatedError):
        await world.logins.login(given)


async def test_a_key_that_is_revoked_while_it_is_hashed_is_not_let_in(world: World) -> None:
    given = world.add()
    world.gate.clear()
    login = asyncio.create_task(world.logins.login(given))
    await asyncio.sleep(0)
    world.keys.clear()
    world.gate.set()
    with pytest.raises(UnauthenticatedError):
        await login


async def test_a_key_that_expires_is_not_known_any_more(world: World) -> None:
    given = world.add(expires_s=1010.0)
    await world.logins.login(given)
    world.time_s = 1010.0
    assert world.logins.known(given) is None


async def test_the_secret_before_is_good_as_long_as_it_was_given(world: World) -> None:
    before = world.add()
    await world.logins.login(before)
    key, after = rotated(world.key, now_s=world.time_s, grace_s=5.0)
    world.keys[key.key_id] = key
    assert world.logins.known(before) is not None, "without another hash"
    assert (await world.logins.login(after)).name == "chat"
    world.time_s += 5.0
    assert world.logins.known(before) is None and world.logins.known(after) is not None


async def test_what_is_wrong_is_not_said(world: World) -> None:
    good, expired = world.add(), world.add("old", expires_s=10.0)
    sentences = set()
    for given in ("", "x", f"{good[:-1]}!", _almost(good), expired, UNKNOWN):
        with pytest.raises(UnauthenticatedError) as raised:
            await world.logins.login(given)
        sentences.add(str(raised.value))
    assert len(sentences) == 1


async def test_ten_thousand_keys_with_unknown_ids_cost_no_hash(world: World) -> None:
    good = world.add()
    for number in range(10_000):
        with pytest.raises(UnauthenticatedError):
            await world.logins.login(f"rk-{'a' * 16}-{number:043}")
    assert world.logins.hashed == 0 and world.logins.refused == {"wrong_key": 10_000}
    assert (await world.logins.login(good)).name == "chat"


async def test_ten_thousand_wrong_secrets_of_a_key_cost_twenty_hashes(world: World) -> None:
    good, other = world.add(), world.add("other")
    await world.logins.login(good)
    refused = 0
    for number in range(10_000):
        with pytest.raises((UnauthenticatedError, OverloadedError)) as raised:
            await world.logins.login(f"{good[:20]}{number:043}")
        refused += isinstance(raised.value, OverloadedError)
    assert world.logins.hashed == 1 + 20 and refused == 10_000 - 20
    assert world.logins.refused == {"wrong_key": 20, "too_often": 9_980}
    assert (await world.logins.login(good)).name == "chat", "who is known goes on being served"
    assert (await world.logins.login(other)).name == "other", "and other keys are not held up"


async def test_time_forgives(world: World) -> None:
    good = world.add()
    for number in range(25):
        with pytest.raises((UnauthenticatedError, OverloadedError)):
            await world.logins.login(f"{good[:20]}{number:043}")
    with pytest.raises(OverloadedError, match="too many failed logins with this key") as raised:
        await world.logins.login(good)
    assert raised.value.retry_after_ms
    world.now_s += 1.0
    assert (await world.logins.login(good)).name == "chat"


async def test_logins_that_succeed_use_nothing_up(world: World) -> None:
    for number in range(30):
        await world.logins.login(world.add(f"k{number}"))


async def test_so_many_wait_for_a_hash_and_the_others_are_told_when_to_come_back(world: World) -> None:
    given, other = world.add(), world.add("other")
    world.gate.clear()
    waiting = [asyncio.create_task(world.logins.login(given)) for _ in range(2048)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="too many logins"):
        await world.logins.login(other)
    world.gate.set()
    assert {each.name for each in await asyncio.gather(*waiting)} == {"chat"}
    assert (await world.logins.login(other)).name == "other"


async def test_who_goes_away_holds_nobody_up(world: World) -> None:
    given = world.add()
    world.gate.clear()
    first, second = (asyncio.create_task(world.logins.login(given)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    world.gate.set()
    assert (await second).name == "chat"


async def test_the_service_itself_is_known_by_its_own_key(world: World) -> None:
    assert world.logins.known("rs-own") is SERVICE
    assert world.logins.known("rs-other") is None
    assert world.logins.hashed == 0
